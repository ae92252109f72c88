"""Judged execution: the program in one sandbox, its tests in another, and data between them."""

import json
from dataclasses import replace
from typing import Any

from quartet_reward.code.judgment import last_word, outcome_of
from quartet_reward.code.outcomes import Outcome, of_end
from quartet_reward.code.report import Finding
from quartet_reward.code.rules import Rules
from quartet_reward.code.tests import FunctionCases, TestProgram
from quartet_reward.sandbox.api import Ending, Job, Sandbox

# The judge ends the program at its time; the sandbox stands behind that, and behind the judge.
_SPARE_SECONDS = 1.0


async def judge(sandbox: Sandbox, program: str, tests: FunctionCases | TestProgram, rules: Rules) -> Outcome:
    """Return what becomes of a program that is called by its tests.

    Raises:
        SandboxUnavailable: it could not be run.
        VerifierFailure: the tests cannot be used, or the judge failed.
    """
    if isinstance(tests, TestProgram):
        task: dict[str, Any] = {"kind": "test_program", "source": tests.source, "prefix": rules.prefix}
        seconds = rules.timeout_seconds
    else:
        task = {
            "kind": "function_cases",
            "cases": tests.cases,
            "arguments": rules.arguments,
            "tolerance": rules.tolerance,
            "any_order": rules.any_order,
            "checker": rules.checker,
        }
        seconds = min(rules.timeout_seconds * len(tests.cases), rules.total_seconds)
    task |= {"entry_point": tests.entry_point, "seconds": rules.timeout_seconds, "total_seconds": seconds}
    task["strict"] = isinstance(tests, FunctionCases) or (rules.strict and tests.entry_point != "")
    limits = rules.limits(seconds + _SPARE_SECONDS)
    judging, execution = await sandbox.run_judged(
        Job("judge", json.dumps(task).encode(), limits=limits, shared=not rules.checker),
        Job("candidate", json.dumps({"source": program, "usual_imports": rules.usual_imports}).encode(), limits=limits),
    )
    if execution.ending is Ending.OUTPUT_EXCEEDED:  # until it was killed, its output went nowhere
        return of_end(execution)
    last = last_word(judging)
    if isinstance(last, Outcome):
        return last
    return replace(of_end(execution), passed=last.passed) if last.finding is Finding.GONE else outcome_of(last)
