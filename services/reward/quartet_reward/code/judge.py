"""The tests' side of judged execution. Only it has the report pipe, and it accepts only data from the program."""

import json
from collections.abc import Callable
from typing import Any

from quartet_reward.code import assertions, function_cases
from quartet_reward.code.program import Decided, Finding, Program, Report, end
from quartet_reward.code.rpc import Channel

PEER_DESCRIPTOR = 3


def main(payload: bytes) -> None:
    """Run the tests and report. `payload`: JSON with `kind` and the arguments of that kind's function."""
    end(_judge(json.loads(payload)))


def _judge(task: dict[str, Any]) -> Report:
    kind, arguments = task["kind"], {name: value for name, value in task.items() if name not in _OF_EVERY_KIND}
    try:
        if kind == "output":
            function_cases.judge_output(**arguments)
        else:
            program = Program(
                task["seconds"],
                task["total_seconds"],
                Channel(PEER_DESCRIPTOR),
                strict=task["strict"],
                own_data=kind == "function_cases" and not task["checker"],
            )
            _KINDS[kind](program, **arguments)
    except Decided as verdict:
        return verdict.report
    return Report(Finding.PASSED, "every test passed")


_KINDS: dict[str, Callable[..., None]] = {"test_program": assertions.judge, "function_cases": function_cases.judge}
_OF_EVERY_KIND = {"kind", "seconds", "total_seconds", "strict"}
