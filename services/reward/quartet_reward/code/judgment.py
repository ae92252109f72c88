"""Reads what a judge reported, and what the lack of a report means.

Whatever a program returns, raises or does is an outcome of that program. A failure is what would be so with any other
program: tests that cannot be used, and a judge that ended before it had asked the program anything.
"""

from quartet.v1 import reward_pb2

from quartet_reward.code import report
from quartet_reward.code.outcomes import OF_FINDING, Outcome, of_limits
from quartet_reward.code.report import Finding, Report
from quartet_reward.failures import VerifierFailure
from quartet_reward.sandbox.api import Ending, Execution


def last_word(judge: Execution) -> Report | Outcome:
    """Return the judge's report, or what its end says of the program that kept it busy.

    Raises:
        VerifierFailure: the judge came to no verdict, through no fault of the program.
    """
    try:
        begun, last = report.read(judge.report)
    except (ValueError, KeyError) as error:
        raise VerifierFailure(
            reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, f"the judge's report cannot be read: {error}"
        ) from error
    if last is not None:
        return last
    limits = of_limits(judge)
    if limits is not None and begun:
        return Outcome(limits.outcome, f"judging what it answered: {limits.reason}")
    if limits is not None:
        raise bad_reference(f"the test exceeded its limits before it asked the program anything: {limits.reason}")
    how = f"signal {judge.signal}" if judge.ending is Ending.SIGNALLED else f"status {judge.exit_code}"
    said = judge.stderr[-500:].decode(errors="replace").strip()
    reason = f"the judge ended with {how}: {said}"
    if begun:
        return Outcome(reward_pb2.OUTCOME_INCORRECT, f"judging what it answered: {reason}")
    raise VerifierFailure(reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, reason)


def outcome_of(last: Report) -> Outcome:
    """Return the outcome that a report states.

    Raises:
        VerifierFailure: the test is broken.
    """
    if last.finding is Finding.BAD_TEST:
        raise bad_reference(last.reason)
    return Outcome(OF_FINDING[last.finding], last.reason, last.passed)


def bad_reference(message: str) -> VerifierFailure:
    """Return the failure of an item whose tests cannot be used."""
    return VerifierFailure(reward_pb2.FAILURE_KIND_BAD_REFERENCE, message)
