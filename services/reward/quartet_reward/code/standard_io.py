"""Programs that read standard input and print: each case runs alone, and what it should print stays in the service."""

import json

from quartet.v1 import reward_pb2

from quartet_reward.code.judgment import last_word, outcome_of
from quartet_reward.code.outcomes import Outcome, of_end
from quartet_reward.code.rules import Rules
from quartet_reward.code.tests import OutputCases
from quartet_reward.code.text import same_output
from quartet_reward.sandbox.api import Ending, Execution, Job, Sandbox

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
    if execution.ending is Ending.EXITED and execution.exit_code == 0:
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
