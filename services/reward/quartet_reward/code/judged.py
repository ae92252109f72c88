"""Runs a program in one sandbox and its tests, the judge, in another, and returns the outcome.

Whatever the program returns, raises or does is an outcome. A failure is what any other program would have got too: the
tests cannot be used, or the judge ended before its first request to the program.
"""

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any

from quartet.v1 import reward_pb2

from quartet_reward.code.program import Finding, read_report
from quartet_reward.code.tests import FunctionCases, OutputCases, Rules, TestProgram
from quartet_reward.code.values import OutputComparison, same_output
from quartet_reward.errors import BadReference, VerifierCrashed
from quartet_reward.sandbox.api import Execution, ExitReason, Job, SandboxUnavailable
from quartet_reward.sandbox.pool import Sandbox

_LONGEST_LAST_LINE = 300

OF_FINDING = {
    Finding.PASSED: reward_pb2.OUTCOME_CORRECT,
    Finding.WRONG: reward_pb2.OUTCOME_INCORRECT,
    Finding.RAISED: reward_pb2.OUTCOME_RUNTIME_ERROR,
    Finding.OUT_OF_MEMORY: reward_pb2.OUTCOME_RESOURCE_EXCEEDED,
    Finding.NOT_COMPILED: reward_pb2.OUTCOME_COMPILE_ERROR,
}
# The judge's own time, beside that of the test; and how much later than the judge's the program's last limit is.
_SPARE_SECONDS = 1.0
_LATER_SECONDS = 5.0
# How the traceback of a syntax error begins: it has no frames.
_NOT_COMPILED = b'  File "program.py", line '
_SYNTAX_ERRORS = (b"SyntaxError", b"IndentationError", b"TabError")
_SHOWN = 80
# Characters of outputs and tasks that are compared and encoded on the event loop.
_LONGEST_COMPARED = 1 << 16
# Bytes that a judge may use more for each byte of an output, as text and in parts.
_MEMORY_OF_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """A value of the contract's Outcome, and why."""

    outcome: int
    reason: str
    passed: int | None = None
    """Tests that passed before the first failure; None: not known."""


def of_limits(execution: Execution) -> Outcome | None:
    """Return the outcome of a program that exceeded a limit, else None."""
    match execution.ending:
        case ExitReason.TIMED_OUT:
            seconds = f"{execution.wall_seconds:.1f} s, {execution.cpu_seconds:.1f} s of CPU time"
            return Outcome(reward_pb2.OUTCOME_TIMED_OUT, f"killed after {seconds}")
        case ExitReason.MEMORY_EXCEEDED:
            return Outcome(reward_pb2.OUTCOME_RESOURCE_EXCEEDED, "the program took more memory than allowed")
        case ExitReason.OUTPUT_EXCEEDED:
            return Outcome(reward_pb2.OUTCOME_RESOURCE_EXCEEDED, "the program printed more than allowed")
    return None


def of_end(execution: Execution) -> Outcome:
    """Return the outcome of a program that ended too early or with an error."""
    limits = of_limits(execution)
    if limits is not None:
        return limits
    how = f"signal {execution.signal}" if execution.ending is ExitReason.SIGNALLED else f"status {execution.exit_code}"
    lines = execution.stderr[-4096:].decode(errors="replace").strip().splitlines()
    said = lines[-1][:_LONGEST_LAST_LINE] if lines else ""
    return Outcome(reward_pb2.OUTCOME_RUNTIME_ERROR, f"the program ended with {how}" + (f": {said}" if said else ""))


def outcome_of(judge: Execution, program: Execution | None = None) -> Outcome:
    """Return the outcome that the judge reports, or, if it ended without one, the outcome that its end implies.

    `program`: the program's execution.

    Raises:
        VerifierFailure: the test is broken, or the judge ended without verdict through no fault of the program.
        SandboxUnavailable: this machine is too busy.
    """
    try:
        begun, last = read_report(judge.report)
    except (ValueError, KeyError) as error:
        raise VerifierCrashed(f"the judge's report cannot be read: {error}") from error
    if last is not None:
        if last.finding is Finding.BAD_TEST:
            raise BadReference(last.reason)
        if last.finding is Finding.LATE:
            raise SandboxUnavailable(last.reason)
        if last.finding is Finding.GONE and program is not None:
            ended = of_end(program)
            if ended.outcome == reward_pb2.OUTCOME_TIMED_OUT:
                ended = replace(ended, reason=f"the program did not answer in time: {ended.reason}")
            return replace(ended, passed=last.passed)
        return Outcome(OF_FINDING[last.finding], last.reason, last.passed)
    limits = of_limits(judge)
    if limits is not None and begun:
        return Outcome(limits.outcome, f"comparing its answer failed: {limits.reason}")
    if limits is not None:
        raise BadReference(f"the test exceeded its limits before it called the program: {limits.reason}")
    how = f"signal {judge.signal}" if judge.ending is ExitReason.SIGNALLED else f"status {judge.exit_code}"
    said = judge.stderr[-500:].decode(errors="replace").strip()
    reason = f"the judge ended with {how}: {said}"
    if begun:
        return Outcome(reward_pb2.OUTCOME_INCORRECT, f"comparing its answer failed: {reason}")
    raise VerifierCrashed(reason)


async def judge(sandbox: Sandbox, program: str, tests: FunctionCases | TestProgram, rules: Rules) -> Outcome:
    """Return the outcome of a program that its tests call.

    Raises:
        SandboxUnavailable: the program could not be run.
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
            "compare": rules.compare,
            "tolerance": rules.tolerance,
            "checker": rules.checker,
        }
        seconds = min(rules.timeout_seconds * len(tests.cases), rules.total_seconds)
    task |= {"entry_point": tests.entry_point, "seconds": rules.timeout_seconds, "total_seconds": seconds}
    task["strict"] = isinstance(tests, FunctionCases) or (rules.strict and tests.entry_point != "")
    # The judge tells when the program is late. Each has processor time of its own, and the wall time of both.
    cpu_seconds = seconds + _SPARE_SECONDS
    limits = rules.limits(seconds + cpu_seconds, cpu_seconds)
    judging, execution = await sandbox.run_judged(
        Job("judge", await encoded(task), limits=limits, reports=True),
        Job("candidate", program.encode(), limits=rules.limits(limits.wall_seconds + _LATER_SECONDS, cpu_seconds)),
    )
    if execution.ending is ExitReason.OUTPUT_EXCEEDED:
        return of_end(execution)
    return outcome_of(judging, execution)


async def judge_outputs(sandbox: Sandbox, program: str, tests: OutputCases, rules: Rules) -> Outcome:
    """Return the outcome of the first case that fails, or CORRECT if none does.

    Raises:
        SandboxUnavailable: the program could not be run.
        VerifierFailure: the checker cannot be used.
    """
    left = rules.total_seconds  # the program's wall time; waiting for a slot or a processor does not count
    count = len(tests.cases)
    for index, (given, expected) in enumerate(tests.cases):
        if left <= 0:
            return Outcome(
                reward_pb2.OUTCOME_TIMED_OUT,
                f"{index} of {count} cases took all of total_seconds, {rules.total_seconds:g} s",
                passed=index,
            )
        limits = rules.limits(min(rules.timeout_seconds, left))
        execution = await sandbox.run(Job("script", program.encode(), stdin=given.encode(), limits=limits))
        left -= execution.wall_seconds - execution.waited_seconds
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
    """Compare an output here; with a checker, or where that would hold up the event loop, in a sandbox."""
    output = execution.stdout
    if rules.checker or len(output) + len(expected) > _LONGEST_COMPARED:
        task: dict[str, Any] = {
            "kind": "output",
            "checker": rules.checker,
            "input": given if rules.checker else "",
            "expected": expected,
        }
        task |= {"compare": rules.compare, "tolerance": rules.tolerance}
        limits = rules.limits(rules.timeout_seconds)
        limits = replace(limits, memory_bytes=limits.memory_bytes + _MEMORY_OF_OUTPUT * len(output))
        return outcome_of(await sandbox.run(Job("judge", await encoded(task), output, limits, reports=True)))
    text = output.decode(errors="replace")
    if same_output(text, expected, OutputComparison.of(rules.compare, rules.tolerance)):
        return Outcome(reward_pb2.OUTCOME_CORRECT, "the output is right")
    return Outcome(reward_pb2.OUTCOME_INCORRECT, f"the output {text[:_SHOWN]!r} is not what is expected")


async def encoded(task: dict[str, Any]) -> bytes:
    """Return a task as JSON; a large one in a thread and part by part: one call would hold the event loop up."""
    if _size(task) <= _LONGEST_COMPARED:
        return json.dumps(task).encode()
    return await asyncio.to_thread(lambda: b"".join(part.encode() for part in json.JSONEncoder().iterencode(task)))


def _size(value: Any) -> int:
    """Return about how many characters a task has as JSON, at least."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 1
