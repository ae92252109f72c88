"""Finds thoughts, tags, boxes and trailing special tokens in a completion, in linear time, however long it is."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

# End-of-turn, end-of-text and padding tokens of common tokenizers.
SPECIAL_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "</s>",
    "<eos>",
    "<pad>",
    "<|pad|>",
)

THINK_ANSWER_TAGS = ("<think>", "</think>", "<answer>", "</answer>")

ThoughtMarkers = Sequence[tuple[str, str]]
"""Pairs of texts that open and close a thought."""

THOUGHT_MARKERS: ThoughtMarkers = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    # Harmony: whatever precedes the final channel is a thought or the call of a tool.
    ("<|channel|>analysis", "<|channel|>final<|message|>"),
    ("<|channel|>commentary", "<|channel|>final<|message|>"),
)

# Characters at the end of a prompt in which an opened thought is looked for.
_LONGEST_OPENED = 4_000

# Characters at the end of a completion in which boxes are looked for.
LONGEST_READ = 100_000

_BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)"
    # Without braces, a number or a letter.
    r"|\\(?:boxed|fbox)\s*(?P<bare>\d+(?:\.\d+)?|(?<=\s)[a-zA-Z])(?=[.,;]?(?:\s|\$|\\[)\]]|$))"
    r"|(?P<escaped>\\.)|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_QUESTION = re.compile(r"[\s$)*\]]{0,4}[?？]")


def without_trailing_special_tokens(text: str, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> str:
    """Return `text` without white space and special tokens at its end, in any order."""
    text = text.rstrip()
    tokens = tuple(token for token in special_tokens if token)
    if not text.endswith(tokens):
        return text
    # One match from the end: removing token by token would copy the text each time.
    backwards, end, run = text[::-1], 0, _run_of(tokens)
    while (part := run.match(backwards, end)) and part.end() > end:
        end = part.end()
    return text[: len(text) - end]


@functools.lru_cache(maxsize=64)
def _run_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of reversed tokens and white space, up to 10,000 of them."""
    # Possessive, because backtracking would store each repetition. Bounded, because a match holds the GIL.
    return re.compile(f"(?:\\s|{'|'.join(re.escape(token[::-1]) for token in tokens)}){{0,10000}}+")


def fault_of_think_answer_form(text: str, prompt: str = "", tags: Sequence[str] = THINK_ANSWER_TAGS) -> str:
    """Return why `text` is not `<think>…</think>…<answer>…</answer>` with each tag once; "" if it is.

    The prompt may have opened the thought. `tags`: others for these four.
    """
    thought, close_thought, answer, close = tags
    if not text.startswith(thought) and opens_thought(prompt, ((thought, close_thought),)):
        text = thought + text
    position = -1
    for tag in tags:
        count = text.count(tag)
        if count != 1:
            return f"{tag} stands {count} times; it must stand once"
        found = text.find(tag)
        if found < position:
            return f"{tag} stands too early; the order is {' '.join(tags)}"
        position = found
    if not text.endswith(close):
        return f"text follows {close}"
    return "" if last_tagged_answer(text, answer, close) else "the answer is empty"


def last_tagged_answer(text: str, opening: str = "<answer>", closing: str = "</answer>") -> str | None:
    """Return the content of the last `<answer>…</answer>`, or None if there is none."""
    end = text.rfind(closing)
    if end < 0:
        return None
    start = text.rfind(opening, 0, end)
    return None if start < 0 else text[start + len(opening) : end].strip()


def after_thinking(text: str, prompt: str = "", markers: ThoughtMarkers = THOUGHT_MARKERS) -> str:
    """Return the text after the last closed thought, up to an unclosed one: what stands in thoughts is no answer.

    A closing marker that nothing opened ends a thought that began before the completion.

    Args:
        text: the completion.
        prompt: the prompt as the model read it. If it opens a thought, `text` begins within that thought, and has no
            answer unless it closes it.
        markers: the texts that open and close thoughts.
    """
    closing = _thought_opened_by(prompt, markers)
    start = end = at = 0
    closing_of = dict(markers)
    present = tuple(sorted({marker for pair in markers for marker in pair if marker in text}, key=len, reverse=True))
    if not closing and closing_of.keys().isdisjoint(present):
        return text[max((text.rfind(marker) + len(marker) for marker in present), default=0) :]
    while True:
        if closing:
            at = text.find(closing, at)
            if at < 0:
                return text[start:end]
            start = at = at + len(closing)
        found = _any_of(present).search(text, at) if present else None
        if found is None:
            return text[start:]
        at, closing = found.end(), closing_of.get(found[0], "")
        start, end = (start, found.start()) if closing else (at, 0)


@functools.lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def opens_thought(prompt: str, markers: ThoughtMarkers = THOUGHT_MARKERS) -> bool:
    """Return whether a prompt ends within a thought: its template opened one, or it continues an assistant's message.

    A marker that a prompt only mentions ("Begin with <think>.") opens none: text or the end of a turn follows it.
    """
    return bool(_thought_opened_by(prompt, markers))


def _thought_opened_by(prompt: str, markers: ThoughtMarkers) -> str:
    """Return the marker that closes the thought within which a prompt ends; "" if it ends in none."""
    if not prompt:
        return ""
    tail = prompt[-_LONGEST_OPENED:]
    last, opening, closing = max((tail.rfind(opening), opening, closing) for opening, closing in markers)
    if last < 0 or closing in tail[last:]:
        return ""
    before, after = tail[:last], tail[last + len(opening) :].removeprefix("<|message|>")
    begins_line = not before or before[-1] in "\n>"
    continued = begins_line and after[:1].isspace() and "<|" not in after and "</s>" not in after
    return closing if continued or not after.strip() else ""


@dataclass(frozen=True, slots=True)
class Box:
    """A complete `\\boxed{…}` (or `\\fbox`): its position and content."""

    start: int
    end: int
    content: str


def boxes(text: str) -> list[Box]:
    """Return the complete boxes at the end of `text`, in order; of nested boxes, the outer one.

    A box that a question mark follows ("maybe \\boxed{4}?") states nothing.
    """
    if "\\boxed" not in text and "\\fbox" not in text:
        return []
    open_braces: list[tuple[int, int]] = []  # start of each open box and of its content; (-1, -1): another brace
    found: list[Box] = []
    for token in _BRACES.finditer(text, max(len(text) - LONGEST_READ, 0)):
        if token.lastgroup == "box":
            open_braces.append(token.span())
        elif token.lastgroup == "open":
            open_braces.append((-1, -1))
        elif token.lastgroup == "bare":
            if not _QUESTION.match(text, token.end()):
                found.append(Box(token.start(), token.end(), token["bare"]))
        elif token.lastgroup == "close" and open_braces:
            start, inside = open_braces.pop()
            if start >= 0:
                while found and found[-1].start > start:
                    found.pop()
                if not _QUESTION.match(text, token.end()):
                    found.append(Box(start, token.end(), text[inside : token.start()].strip()))
    return found


def last_box(text: str) -> Box | None:
    """Return the last complete box, or None if there is none."""
    found = boxes(text)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete `\\boxed{…}` (or `\\fbox`), or None if there is none."""
    found = last_box(text)
    return None if found is None else found.content
