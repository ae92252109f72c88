"""Finds the program in a completion."""

import re
from enum import StrEnum

_PYTHON_FENCE = "```python"
_FENCE = "```"
_ANY_FENCE = re.compile(r"```[^\n`]*\n")


class ProgramIn(StrEnum):
    """Where a completion's program stands."""

    LAST_PYTHON_FENCE = "last_python_fence"
    """After the last ```python, up to the next ``` or the end: ColossalChat's way."""
    LAST_FENCE = "last_fence"
    """In the last fenced block, whatever language it names."""
    COMPLETION = "completion"
    """The completion is the program. Fenced blocks are no exception."""


def find_program(completion: str, place: ProgramIn) -> str | None:
    """Return the program, None if there is none where it should be."""
    if place is ProgramIn.COMPLETION:
        program = completion
    elif place is ProgramIn.LAST_PYTHON_FENCE:
        _, fence, rest = completion.rpartition(_PYTHON_FENCE)
        if not fence:
            return None
        program = rest.partition(_FENCE)[0]
        # Of ```python3 the digit would be left.
        first, newline, others = program.partition("\n")
        if newline and first.strip().isalnum():
            program = others
    else:
        blocks = _blocks(completion)
        if not blocks:
            return None
        program = blocks[-1]
    return program if program.strip() else None


def _blocks(text: str) -> list[str]:
    blocks, position = [], 0
    while (position := text.find(_FENCE, position)) >= 0:
        opening = _ANY_FENCE.match(text, position)
        if opening is None:
            position += 1
            continue
        closing = text.find(_FENCE, opening.end())
        blocks.append(text[opening.end() : closing if closing >= 0 else len(text)])
        if closing < 0:
            break
        position = closing + len(_FENCE)
    return blocks
