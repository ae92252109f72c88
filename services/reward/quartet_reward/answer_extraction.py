"""Finds the answer in a completion. Pure text, linear time: a completion may be megabytes of anything."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

# What tokenizers write for the end of a turn or of a text, and for padding.
SPECIAL_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<pad>",
    "<|pad|>",
)

THINK_ANSWER_TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# An answer stands at the end; what is farther away is working, and not worth the service's time.
LONGEST_READ = 100_000
# "and", a name and an equals sign fit between two boxes of one list; a sentence does not.
_LONGEST_BETWEEN_BOXES = 48
_SENTENCE_END = re.compile(r"[.!?]\s|\n\s*\n")
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LETTER = re.compile(r"[^\W\d_]")
_AND = re.compile(r",|;|\b(?:and|or)\b", re.IGNORECASE)

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|(?P<escaped>\\.)|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def without_trailing_special_tokens(text: str, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> str:
    """Return `text` without white space and special tokens at its end, in whatever order they stand there."""
    text = text.rstrip()
    tokens = tuple(token for token in special_tokens if token)
    if not text.endswith(tokens):
        return text
    # Read backwards, it is one pass; taken off one by one, each token would cost a copy of the text.
    backwards, end, run = text[::-1], 0, _run_of(tokens)
    while (part := run.match(backwards, end)) and part.end() > end:
        end = part.end()
    return text[: len(text) - end]


@functools.lru_cache(maxsize=64)
def _run_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of white space and tokens that are read backwards, some at a time."""
    # Possessive, as a repetition that can be taken back is remembered turn by turn. Bounded, as no other thread runs
    # during one match.
    return re.compile(f"(?:\\s|{'|'.join(re.escape(token[::-1]) for token in tokens)}){{0,10000}}+")


def fault_of_think_answer_form(text: str) -> str:
    """Return why `text` is not `<think>…</think>…<answer>…</answer>`, each tag once and nothing after; "" if it is."""
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
    """Return what the last `<answer>…</answer>` holds, or None if there is none."""
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def after_thinking(text: str) -> str:
    """Return what follows the thought, since a box in it is no answer; nothing follows one that never ends."""
    closed = text.rfind("</think>")
    rest = text if closed < 0 else text[closed + len("</think>") :]
    opened = rest.find("<think>")
    return rest if opened < 0 else rest[:opened]


@dataclass(frozen=True, slots=True)
class Box:
    """A complete `\\boxed{…}` (or `\\fbox`): where it stands and what it holds."""

    start: int
    end: int
    content: str


def boxes(text: str) -> list[Box]:
    """Return the complete boxes of the end of `text`, braces matched, in order; of boxes in boxes, the outer one."""
    open_braces: list[tuple[int, int]] = []  # of each open box: where it and its content start; (-1, -1): another brace
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
    """Return what the last complete `\\boxed{…}` (or `\\fbox`) holds, or None if there is none."""
    found = last_box(text)
    return None if found is None else found.content


def joined_boxes(text: str) -> list[str]:
    """Return what the last box holds and those that form one list with it: `\\boxed{1}, \\boxed{2} and \\boxed{3}`.

    Boxes are one list if little stands between them: signs, or words of which one is "and" or "or". Boxes that equals
    signs join are one element, an equation.
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
