"""The tests' side of judged execution. It alone has the report pipe, and it reads nothing from the program but data."""

import json
from collections.abc import Callable
from typing import Any

from quartet_reward.code import assertions, checker, function_cases
from quartet_reward.code.channel import Channel
from quartet_reward.code.program import Program, end
from quartet_reward.code.report import Finding, Report, Verdict

PEER_DESCRIPTOR = 3


def main(payload: bytes) -> None:
    """Judge. `payload`: JSON with `kind` and what that kind takes."""
    end(last_word_on(json.loads(payload), PEER_DESCRIPTOR))


def last_word_on(task: dict[str, Any], descriptor: int) -> Report:
    """Judge the program behind a socket. What ends a judgment at once ends the process, after its report."""
    kind, rest = task["kind"], {name: value for name, value in task.items() if name not in _NOT_THE_KINDS}
    try:
        if kind == "output":
            checker.judge_output(**rest)
        else:
            program = Program(
                task["seconds"],
                task["total_seconds"],
                Channel(descriptor),
                strict=task["strict"],
                own_data=kind == "function_cases" and not task["checker"],
            )
            _KINDS[kind](program, **rest)
    except Verdict as verdict:
        return verdict.report
    return Report(Finding.PASSED, "every test passed")


_KINDS: dict[str, Callable[..., None]] = {"test_program": assertions.judge, "function_cases": function_cases.judge}
_NOT_THE_KINDS = {"kind", "seconds", "total_seconds", "strict"}
