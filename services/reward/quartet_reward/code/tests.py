"""What a reference gives to test a program with: one of three styles."""

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
    """Where a completion's program stands."""

    LAST_PYTHON_FENCE = "last_python_fence"
    """After the last ```python, up to the next ``` or the end: ColossalChat's way."""
    LAST_FENCE = "last_fence"
    """In the last fenced block, whatever language it names."""
    COMPLETION = "completion"
    """The completion is the program. Fenced blocks are no exception."""


def find_program(completion: str, place: ProgramIn) -> str | None:
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


@dataclass(frozen=True, slots=True)
class OutputCases:
    """Standard input, and what is to be printed."""

    cases: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class FunctionCases:
    """Arguments and result of a function, as JSON."""

    entry_point: str
    cases: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class TestProgram:
    """A program of assertions."""

    __test__ = False

    source: str
    entry_point: str
    """The function under test; empty: found from the names that the test uses."""


Tests = OutputCases | FunctionCases | TestProgram


def read_tests(reference: reward_pb2.Reference) -> Tests:
    """Return what the reference gives. Raises BadReference: nothing, two styles at once, or what cannot be used."""
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
        raise BadReference(f"{field}: {text[:80]!r} is no JSON ({error}), which cases of a function are") from None


class Rules(BaseModel):
    """The parameters of `code` that are about judging."""

    prefix: str = Field("", description="Source put before the program, e.g. a prompt that completions continue.")
    timeout_seconds: float = Field(
        10.0, ge=0.1, le=600, description="Seconds for each case, or for a whole test program."
    )
    total_seconds: float = Field(120.0, ge=0.1, le=3600, description="Seconds for all cases together.")
    memory_bytes: int = Field(512 << 20, ge=32 << 20, le=64 << 30, description="Memory that the program may use.")
    output_bytes: int = Field(1 << 20, ge=1 << 10, le=64 << 20, description="Most that the program may print.")
    compare: Literal["lines", "tokens"] = Field(
        "lines", description="Printed output: lines without trailing white space, or what white space separates."
    )
    tolerance: float = Field(
        0.0, ge=0, le=1, description="Numbers may differ by so much, absolutely or by that share of the expected one."
    )
    checker: str = Field(
        "", description="Source of a checker program, which defines check(input, output, expected) -> bool."
    )
    arguments: Literal["auto", "list", "lines"] = Field(
        "auto", description="Input of a function's case: a JSON list of arguments, or one JSON argument a line."
    )
    strict: bool = Field(
        True, description="Of the program a test program sees `entry_point` alone, which answers with plain data."
    )

    def limits(self, seconds: float) -> Limits:
        """Return the limits of a program that may take so long, in wall time and in processor time."""
        return Limits(seconds, seconds, self.memory_bytes, output_bytes=self.output_bytes)
