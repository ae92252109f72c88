"""From how executions ended to what is true of the program."""

from dataclasses import dataclass

from quartet.v1 import reward_pb2

from quartet_reward.code.report import Finding
from quartet_reward.sandbox.api import Ending, Execution

_LONGEST_LAST_LINE = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """A value of the contract's Outcome, and why."""

    outcome: int
    reason: str
    passed: int | None = None
    """Tests that passed before the first that did not; None: not known."""


OF_FINDING = {
    Finding.PASSED: reward_pb2.OUTCOME_CORRECT,
    Finding.WRONG: reward_pb2.OUTCOME_INCORRECT,
    Finding.RAISED: reward_pb2.OUTCOME_RUNTIME_ERROR,
    Finding.OUT_OF_MEMORY: reward_pb2.OUTCOME_RESOURCE_EXCEEDED,
    Finding.NOT_COMPILED: reward_pb2.OUTCOME_COMPILE_ERROR,
    Finding.LATE: reward_pb2.OUTCOME_TIMED_OUT,
}


def of_limits(execution: Execution) -> Outcome | None:
    """Return the outcome of a program that met a limit, None if it met none."""
    match execution.ending:
        case Ending.TIMED_OUT:
            seconds = f"{execution.wall_seconds:.1f} s, of processor time {execution.cpu_seconds:.1f} s"
            return Outcome(reward_pb2.OUTCOME_TIMED_OUT, f"killed after {seconds}")
        case Ending.MEMORY_EXCEEDED:
            return Outcome(reward_pb2.OUTCOME_RESOURCE_EXCEEDED, "the program took more memory than allowed")
        case Ending.OUTPUT_EXCEEDED:
            return Outcome(reward_pb2.OUTCOME_RESOURCE_EXCEEDED, "the program printed more than allowed")
    return None


def of_end(execution: Execution) -> Outcome:
    """Return the outcome of a program that ended where it should not have."""
    limits = of_limits(execution)
    if limits is not None:
        return limits
    how = f"signal {execution.signal}" if execution.ending is Ending.SIGNALLED else f"status {execution.exit_code}"
    said = _last_line(execution.stderr)
    return Outcome(reward_pb2.OUTCOME_RUNTIME_ERROR, f"the program ended with {how}" + (f": {said}" if said else ""))


def _last_line(text: bytes) -> str:
    lines = text[-4096:].decode(errors="replace").strip().splitlines()
    return lines[-1][:_LONGEST_LAST_LINE] if lines else ""
