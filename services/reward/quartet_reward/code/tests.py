"""Reads a reference's tests, which have one of three styles."""

import json
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field
from quartet.v1 import reward_pb2

from quartet_reward.code.rpc import PATIENCE
from quartet_reward.code.values import Compare
from quartet_reward.errors import BadReference
from quartet_reward.sandbox.api import Limits


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
    compare: Compare = Field(
        "lines",
        description="Compare printed output by lines, without trailing white space, or by tokens. `lenient`: by lines, "
        "ignoring case, and floats to 1e-5 (or `tolerance`); likewise the texts and floats of results.",
    )
    tolerance: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Largest difference where a float is expected, absolute or relative; integers must be the same.",
    )
    checker: str = Field(
        "", description="Source of a checker program, which defines check(input, output, expected) -> bool."
    )
    arguments: Literal["auto", "list", "lines"] = Field(
        "auto", description="Input of a function's case: a JSON list of arguments, or one JSON argument a line."
    )
    strict: bool = Field(True, description="A test program can call only `entry_point`, which must return plain data.")

    def limits(self, wall_seconds: float, cpu_seconds: float | None = None) -> Limits:
        """Return the sandbox limits of a program, by default with as much CPU time as wall time."""
        cpu_seconds = wall_seconds if cpu_seconds is None else cpu_seconds
        return Limits(wall_seconds, cpu_seconds, self.memory_bytes, output_bytes=self.output_bytes, patience=PATIENCE)
