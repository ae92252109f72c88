"""Programs that read standard input and print: each case runs alone, and what it should print stays in the service."""

import json

from quartet.v1 import reward_pb2

from quartet_reward.code.judged import Outcome, last_word, of_end, outcome_of
from quartet_reward.code.tests import OutputCases, Rules
from quartet_reward.code.values import close, match_in_any_order
from quartet_reward.sandbox.api import Execution, ExitReason, Job, Sandbox

# A traceback that begins with its file has no frames: there was nothing to run yet.
_NOT_COMPILED = b'  File "program.py", line '
_SYNTAX_ERRORS = (b"SyntaxError", b"IndentationError", b"TabError")
_SHOWN = 80


async def judge(sandbox: Sandbox, program: str, tests: OutputCases, rules: Rules) -> Outcome:
    """Return the outcome of the first case that fails, or of all.

    Raises:
        SandboxUnavailable: the program could not be run.
        VerifierFailure: the checker cannot be used.
    """
    left = rules.total_seconds  # of the program's own time: how long it waits for a slot says nothing about it
    count = len(tests.cases)
    for index, (given, expected) in enumerate(tests.cases):
        if left <= 0:
            return Outcome(
                reward_pb2.OUTCOME_TIMED_OUT,
                f"{index} of {count} cases took {rules.total_seconds:g} s, which is all",
                passed=index,
            )
        limits = rules.limits(min(rules.timeout_seconds, left))
        execution = await sandbox.run(Job("script", program.encode(), stdin=given.encode(), limits=limits))
        left -= execution.wall_seconds
        outcome = _ended_badly(execution) or await _judge_output(sandbox, execution, given, expected, rules)
        if outcome.outcome != reward_pb2.OUTCOME_CORRECT:
            return Outcome(outcome.outcome, f"case {index + 1} of {count}: {outcome.reason}", passed=index)
    return Outcome(reward_pb2.OUTCOME_CORRECT, f"all {count} cases are right", passed=count)


def _ended_badly(execution: Execution) -> Outcome | None:
    if execution.ending is ExitReason.EXITED and execution.exit_code == 0:
        return None
    last = execution.stderr.strip().rpartition(b"\n")[2]
    if execution.stderr.startswith(_NOT_COMPILED) and last.startswith(_SYNTAX_ERRORS):
        return Outcome(reward_pb2.OUTCOME_COMPILE_ERROR, last.decode(errors="replace")[:300])
    return of_end(execution)


async def _judge_output(sandbox: Sandbox, execution: Execution, given: str, expected: str, rules: Rules) -> Outcome:
    output = execution.stdout.decode(errors="replace")
    if rules.checker:
        task = {"kind": "output", "checker": rules.checker, "input": given, "output": output, "expected": expected}
        job = Job("judge", json.dumps(task).encode(), limits=rules.limits(rules.timeout_seconds))
        last = last_word(await sandbox.run(job))
        return last if isinstance(last, Outcome) else outcome_of(last)
    if same_output(output, expected, by_tokens=rules.by_tokens, any_order=rules.any_order, tolerance=rules.tolerance):
        return Outcome(reward_pb2.OUTCOME_CORRECT, "the output is right")
    return Outcome(reward_pb2.OUTCOME_INCORRECT, f"the output {output[:_SHOWN]!r} is not what is expected")


def same_output(found: str, expected: str, *, by_tokens: bool, any_order: bool, tolerance: float) -> bool:
    """True if two outputs are the same.

    Args:
        by_tokens: compare what white space separates; else lines, without the white space at their ends and without
            the empty lines at the end.
        any_order: the tokens, or lines, may come in any order.
        tolerance: numbers may differ by so much, or by that share of the expected one; every other token must be the
            same. 0: the text counts.
    """
    ours, theirs = _parts(found, by_tokens), _parts(expected, by_tokens)
    if ours == theirs:
        return True
    if any_order:
        return match_in_any_order(ours, theirs, lambda one, other: _close_parts(one, other, tolerance))
    return len(ours) == len(theirs) and all(
        _close_parts(one, other, tolerance) for one, other in zip(ours, theirs, strict=True)
    )


def _parts(text: str, by_tokens: bool) -> list[str]:
    if by_tokens:
        return text.split()
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _close_parts(found: str, expected: str, tolerance: float) -> bool:
    if found == expected or not tolerance:
        return found == expected
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(
        one == other or _close_numbers(one, other, tolerance) for one, other in zip(ours, theirs, strict=True)
    )


def _close_numbers(found: str, expected: str, tolerance: float) -> bool:
    try:
        return close(float(found), float(expected), tolerance)
    except ValueError:
        return False
