"""Finds tags, boxes and trailing special tokens in a completion, in linear time: it may be megabytes of anything."""

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
_LONGEST_OPENED = 20_000

# Characters at the end of a completion in which boxes are looked for.
LONGEST_READ = 100_000
# Long enough for "and", a name and an equals sign between two boxes of a list, too short for a sentence.
_LONGEST_BETWEEN_BOXES = 48
_SENTENCE_END = re.compile(r"[.!?]\s|\n\s*\n")
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LETTER = re.compile(r"[^\W\d_]")
_AND = re.compile(r",|;|\b(?:and|or)\b", re.IGNORECASE)

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|(?P<escaped>\\.)|(?P<open>\{)|(?P<close>\})", re.DOTALL)


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


def fault_of_think_answer_form(text: str) -> str:
    """Return why `text` is not `<think>…</think>…<answer>…</answer>` with each tag once; "" if it is."""
    position = -1
    for tag in THINK_ANSWER_TAGS:
        count = text.count(tag)
        if count != 1:
            return f"{tag} stands {count} times; it must stand once"
        found = text.find(tag)
        if found < position:
            return f"{tag} stands too early; the order is {' '.join(THINK_ANSWER_TAGS)}"
        position = found
    if not text.endswith("</answer>"):
        return "text follows </answer>"
    return ""


def last_tagged_answer(text: str) -> str | None:
    """Return the content of the last `<answer>…</answer>`, or None if there is none."""
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def after_thinking(text: str, prompt: str = "", markers: ThoughtMarkers = THOUGHT_MARKERS) -> str:
    """Return the text after the last closed thought, up to an unclosed one: what stands in thoughts is no answer.

    Args:
        text: the completion.
        prompt: the prompt as the model read it. If it opens a thought, `text` begins within that thought, and has no
            answer unless it closes it.
        markers: the texts that open and close thoughts.
    """
    closed = max(text.rfind(close) + len(close) if close in text else 0 for _, close in markers)
    if not closed and opens_thought(prompt, markers):
        return ""
    opened = [at for open_, _ in markers if (at := text.find(open_, closed)) >= 0]
    return text[closed : min(opened)] if opened else text[closed:]


def opens_thought(prompt: str, markers: ThoughtMarkers = THOUGHT_MARKERS) -> bool:
    """Return whether a prompt ends within a thought: its template opened one, or it continues an assistant's message.

    A marker that a prompt only mentions ("Begin with <think>.") opens none: text or the end of a turn follows it.
    """
    tail = prompt[-_LONGEST_OPENED:]
    last, opening, close = max((tail.rfind(open_), open_, close) for open_, close in markers)
    if last < 0 or close in tail[last:]:
        return False
    before, after = tail[:last], tail[last + len(opening) :].removeprefix("<|message|>")
    begins_line = not before or before[-1] in "\n>"
    return not after.strip() or (begins_line and after[0].isspace() and "<|" not in after and "</s>" not in after)


@dataclass(frozen=True, slots=True)
class Box:
    """A complete `\\boxed{…}` (or `\\fbox`): its position and content."""

    start: int
    end: int
    content: str


def boxes(text: str) -> list[Box]:
    """Return the complete boxes at the end of `text`, in order; of nested boxes, the outer one."""
    open_braces: list[tuple[int, int]] = []  # start of each open box and of its content; (-1, -1): another brace
    found: list[Box] = []
    for token in _BRACES.finditer(text, max(len(text) - LONGEST_READ, 0)):
        if token.lastgroup == "box":
            open_braces.append(token.span())
        elif token.lastgroup == "open":
            open_braces.append((-1, -1))
        elif token.lastgroup == "close" and open_braces:
            start, inside = open_braces.pop()
            if start >= 0:
                while found and found[-1].start > start:
                    found.pop()
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


def joined_boxes(text: str) -> list[str]:
    """Return the contents of the last box and those that form a list with it: `\\boxed{1}, \\boxed{2} and \\boxed{3}`.

    Boxes form a list if the text between them is short and has no words, or the word "and" or "or" among them. Boxes
    joined by equals signs are one element, an equation.
    """
    found = boxes(text)
    contents = [box.content for box in found[-1:]]
    for one, following in zip(found[-2::-1], found[:0:-1], strict=False):
        between = text[one.end : following.start]
        if not _joins(between):
            break
        if between.strip(" $\n") == "=":
            contents[0] = f"{one.content} = {contents[0]}"
        else:
            contents.insert(0, one.content)
    return contents


def _joins(between: str) -> bool:
    if len(between) > _LONGEST_BETWEEN_BOXES or _SENTENCE_END.search(between):
        return False
    words = _LATEX_COMMAND.sub(" ", between)
    return not _LETTER.search(words) or bool(_AND.search(words))
