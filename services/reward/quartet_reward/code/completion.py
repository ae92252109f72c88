"""Finds the program in a completion."""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from quartet_reward.answer_extraction import THOUGHT_MARKERS, ThoughtMarkers, after_thinking
from quartet_reward.code.fences import Block, Fence, blocks, outside_texts


class ProgramIn(StrEnum):
    """Where the program is in a completion, after its thought."""

    FOUND = "found"
    """In the last block of Python, or else as docs/code.md says."""
    COMPLETION = "completion"
    """The completion is the program, even if it has fenced blocks."""


@dataclass(frozen=True, slots=True)
class Found:
    """A program as it stands in a completion."""

    source: str
    bare: bool = False
    """It stands in no fence: if it does not compile, it is prose."""


_DOES = r"""(?:async[ \t]+)?def[ \t]+\w+[ \t]*\(|class[ \t]+\w+[ \t]*[:(]|import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import\b
    |(?:for|while|with|if|match)\b[^\n]*:|try[ \t]*:|@\w|(?:return|raise|assert|del|global|nonlocal|yield|pass)\b
    |[\w.,\[\]"'()*:\ \t]+?(?:[-+*/%&|^@]|//|\*\*|<<|>>)?=(?!=)"""
_DOES_SOMETHING = re.compile(rf"^[ \t]*(?:{_DOES})", re.MULTILINE | re.VERBOSE)
_CALLS = re.compile(r"^[ \t]*[\w.]+\(", re.MULTILINE)
_BEGINS = re.compile(rf"""[ \t]*(?:{_DOES}|[\w.]+\(|[\[(*]|[rRbBuUfF]{{0,2}}['"])""", re.VERBOSE)
_LONGEST_LINE = 1000
# Characters at the end of a completion in which blocks are looked for: twice the longest program.
_LONGEST_READ = 2 << 20
# Of another speaker or the end of a turn: what follows does not continue the code before.
_TURN = re.compile(r"<\||\[/?INST\]|</?s>|<(?:start|end)_of_turn>|^(?:User|Assistant|Human)\b", re.MULTILINE)


def find_program(
    completion: str,
    place: ProgramIn = ProgramIn.FOUND,
    prompt: str = "",
    prefix: str = "",
    markers: ThoughtMarkers = THOUGHT_MARKERS,
) -> Found | None:
    """Return a completion's program, None if it has none.

    Args:
        completion: the text, without special tokens at its end.
        place: where to look.
        prompt: the prompt as the model read it, which may open a thought or a fence.
        prefix: the code that the program continues; then its indentation is left as it is.
        markers: the texts that open and close thoughts.
    """
    text = after_thinking(completion, prompt, markers)
    if place is ProgramIn.COMPLETION:
        return Found(text) if text.strip() else None
    text = text[-_LONGEST_READ:]
    fence, begun = _opened(prompt) if completion.startswith(text) else (None, "")
    head = _bare(text) if fence is None else None
    found = blocks(text[len(head.source) :] if head else text, fence)
    if head:  # a fence without a language may be the end of the program before it
        found = [each for each in found if each.closed or each.fence.tag]
    program = _last(found, "" if prefix else begun) or head
    if program is None or not program.source.strip():
        return None
    return program if prefix else replace(program, source=_without_margin(program.source))


def _last(found: list[Block], begun: str) -> Found | None:
    """Return the last program of some blocks, the first of which continues `begun`."""
    if begun and found:
        found = [replace(found[0], content=begun + found[0].content), *found[1:]]
    for closed in (True, False):
        of_python = [
            each for each in found if each.closed is closed and each.fence.tag == "python" and each.content.strip()
        ]
        untagged = [each for each in found if each.closed is closed and not each.fence.tag]
        for candidates in (
            of_python,
            [each for each in untagged if _DOES_SOMETHING.search(each.content)],
            [each for each in untagged if _CALLS.search(each.content)],
        ):
            if candidates:
                return Found(candidates[-1].content)
    return None


def _bare(text: str) -> Found | None:
    """Return the text up to its first fence if it begins as a program does."""
    lines = (line for line in text.split("\n", _LONGEST_LINE) if line.strip() and line.lstrip()[0] != "#")
    if not _BEGINS.match(next(lines, "")[:_LONGEST_LINE]):
        return None
    return Found(outside_texts(text), bare=True)


def _opened(prompt: str) -> tuple[Fence | None, str]:
    """Return the fence that a prompt leaves open at its end, and the code that it begins there."""
    found = blocks(prompt)
    if not found or found[-1].closed or found[-1].fence.tag == "other" or _TURN.search(found[-1].content):
        return None, ""
    return found[-1].fence, found[-1].content


def _without_margin(source: str) -> str:
    """Return a program without the indentation of its first line, in each line as far as it has that."""
    first = re.search(r"^([ \t]*)\S", source, re.MULTILINE)
    margin = len(first[1]) if first else 0
    return re.sub(rf"^[ \t]{{1,{margin}}}", "", source, flags=re.MULTILINE) if margin else source
