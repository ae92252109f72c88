"""What the judge tells the service, over a pipe that nothing else writes to."""

import json
import os
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

REPORT_DESCRIPTOR = 4
_LONGEST_REASON = 600
_LONGEST_ERROR = 300

_passed: int | None = None  # of the judgment under way


class Finding(StrEnum):
    """What the judge found."""

    PASSED = "passed"
    """Every test passed."""
    WRONG = "wrong"
    """A test failed, or the program answered with what is no answer."""
    RAISED = "raised"
    """The program raised where the test did not expect it."""
    OUT_OF_MEMORY = "out_of_memory"
    """The program raised MemoryError."""
    NOT_COMPILED = "not_compiled"
    """The program does not compile."""
    LATE = "late"
    """The program did not answer in time."""
    GONE = "gone"
    """The program's process ended; how is in its Execution."""
    BAD_TEST = "bad_test"
    """The test itself is broken: it does not compile, fails before it asks the program anything, or never asks."""


@dataclass(frozen=True, slots=True)
class Report:
    """The judge's last word."""

    finding: Finding
    reason: str
    passed: int | None = None
    """Cases that passed before it; None: there are none to count."""


class Verdict(Exception):
    """Raised in the judge to end the judgment."""

    def __init__(self, finding: Finding, reason: str):
        super().__init__(reason)
        self.report = Report(finding, reason)


def describe(error: BaseException) -> str:
    """Return an exception's type and text, without the text if that raises: what it is made of may be the program's."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"[:_LONGEST_ERROR]
    except Exception:
        return name


def tell_begun(begun: bool = True) -> None:
    """Tell that what happens from now on may be the program's doing; with False, that it is the test's own."""
    _write({"begun": begun})


def count_passed(cases: int | None) -> None:
    """Take note of how many cases have passed; whatever is told last says it too. None: there are none to count."""
    global _passed
    _passed = cases


def tell(report: Report) -> None:
    """Tell the last word."""
    _write(asdict(replace(report, passed=_passed, reason=report.reason[:_LONGEST_REASON])))


def _write(message: dict) -> None:
    os.write(REPORT_DESCRIPTOR, json.dumps(message).encode() + b"\n")


def read(written: bytes) -> tuple[bool, Report | None]:
    """Return whether what happened last may be the program's doing, and the last word, if the judge came to one.

    Raises:
        ValueError: no judge writes so.
    """
    begun, last = False, None
    for line in written.splitlines():
        message = json.loads(line)
        if "finding" in message:
            last = Report(Finding(message["finding"]), message["reason"], message.get("passed"))
        else:
            begun = message["begun"]
    return begun, last
