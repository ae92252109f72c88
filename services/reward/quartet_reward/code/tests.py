"""Reads the program from a completion, and a reference's tests, which have one of three styles."""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, Field
from quartet.v1 import reward_pb2

from quartet_reward.errors import BadReference
from quartet_reward.sandbox.api import Limits

_PYTHON_FENCE = "```python"
_FENCE = "```"
_ANY_FENCE = re.compile(r"```[^\n`]*\n")


class ProgramIn(StrEnum):
    """Where the program is in a completion."""

    LAST_PYTHON_FENCE = "last_python_fence"
    """After the last ```python, up to the next ``` or the end, as in ColossalChat."""
    LAST_FENCE = "last_fence"
    """In the last fenced block of any language."""
    COMPLETION = "completion"
    """The completion is the program, even if it has fenced blocks."""


def find_program(completion: str, place: ProgramIn) -> str | None:
    if place is ProgramIn.COMPLETION:
        program = completion
    elif place is ProgramIn.LAST_PYTHON_FENCE:
        _, fence, rest = completion.rpartition(_PYTHON_FENCE)
        if not fence:
            return None
        program = rest.partition(_FENCE)[0]
        # Drop the "3" of ```python3.
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


@dataclass(frozen=True, slots=True)
class OutputCases:
    """Cases of standard input and expected output."""

    cases: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class FunctionCases:
    """Cases of a function's arguments and expected result, as JSON."""

    entry_point: str
    cases: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class TestProgram:
    """A program of assertions."""

    __test__ = False

    source: str
    entry_point: str
    """The function under test; empty: inferred from the names that the test uses."""


Tests = OutputCases | FunctionCases | TestProgram


def read_tests(reference: reward_pb2.Reference) -> Tests:
    """Return the reference's tests. Raises BadReference: there are none, two styles at once, or invalid JSON."""
    cases = [(case.input, case.output) for case in reference.test_cases]
    entry_point = reference.entry_point.strip()
    if cases and reference.test_program:
        raise BadReference("reference has test_cases and test_program; one of them is allowed")
    if reference.test_program.strip():
        return TestProgram(reference.test_program, entry_point)
    if not cases:
        raise BadReference("reference has neither test_cases nor test_program; this verifier needs one of them")
    if not entry_point:
        return OutputCases(cases)
    for index, (given, expected) in enumerate(cases):
        _require_json(f"reference.test_cases[{index}].output", expected)
        for line in given.splitlines():
            _require_json(f"reference.test_cases[{index}].input", line)
    return FunctionCases(entry_point, cases)


def _require_json(field: str, text: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadReference(f"{field}: {text[:80]!r} is not JSON: {error}") from None


class Rules(BaseModel):
    """The parameters of `code` for running and comparing."""

    prefix: str = Field("", description="Source put before the program, e.g. a prompt that completions continue.")
    timeout_seconds: float = Field(
        10.0, ge=0.1, le=600, description="Seconds for each case, or for a whole test program."
    )
    total_seconds: float = Field(120.0, ge=0.1, le=3600, description="Seconds for all cases together.")
    memory_bytes: int = Field(512 << 20, ge=32 << 20, le=64 << 30, description="Memory that the program may use.")
    output_bytes: int = Field(1 << 20, ge=1 << 10, le=64 << 20, description="Most bytes that the program may print.")
    compare: Literal["lines", "tokens"] = Field(
        "lines", description="Compare printed output by lines, without trailing white space, or by tokens."
    )
    tolerance: float = Field(
        0.0, ge=0, le=1, description="Largest difference of numbers, absolute or relative to the expected one."
    )
    checker: str = Field(
        "", description="Source of a checker program, which defines check(input, output, expected) -> bool."
    )
    arguments: Literal["auto", "list", "lines"] = Field(
        "auto", description="Input of a function's case: a JSON list of arguments, or one JSON argument a line."
    )
    strict: bool = Field(True, description="A test program can call only `entry_point`, which must return plain data.")

    def limits(self, seconds: float) -> Limits:
        """Return the sandbox limits of a program that may take so much wall time and CPU time."""
        return Limits(seconds, seconds, self.memory_bytes, output_bytes=self.output_bytes)
