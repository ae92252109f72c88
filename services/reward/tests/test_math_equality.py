"""What is remembered of the workers' verdicts, and what is asked anew."""

import pytest
from quartet.v1 import reward_pb2

from quartet_reward.equality_policy import EqualityPolicy
from quartet_reward.failures import VerifierFailure
from quartet_reward.math_equality import Equality, MathEquality, Relation
from quartet_reward.worker_pool import Reply
from quartet_reward.worker_process import TaskTimedOut, WorkerDied

EQUAL = {"event": "done", "equal": True, "by_text": False, "reason": "for a test"}
# Not plain, so that a worker is asked.
REFERENCE, ANSWER = r"\sin^2 x", r"1-\cos^2 x"


class ScriptedPool:
    """Answers in turn with what it was given: a worker's message, or an exception to raise."""

    def __init__(self, *script: dict | Exception):
        self._script = list(script)
        self.asked: list[dict] = []

    async def run(self, request: dict) -> Reply:
        self.asked.append(request)
        step = self._script.pop(0)
        if isinstance(step, Exception):
            raise step
        return Reply(step, 0.25)


async def relation(math: MathEquality, answer: str = ANSWER, policy: EqualityPolicy | None = None) -> Relation:
    found = math.compare(answer, REFERENCE, policy or EqualityPolicy())
    return (found if isinstance(found, Equality) else await found()).relation


async def test_a_verdict_is_remembered_by_answer_reference_and_policy():
    pool = ScriptedPool(EQUAL, EQUAL | {"equal": False})
    math = MathEquality(pool)
    assert [await relation(math) for _ in range(3)] == [Relation.EQUAL] * 3
    assert len(pool.asked) == 1 and pool.asked[0]["policy"]["any_names"] is False
    assert await relation(math, policy=EqualityPolicy(any_names=True)) is Relation.DIFFERENT
    assert len(pool.asked) == 2 and pool.asked[1]["policy"]["any_names"] is True
    assert await relation(math) is Relation.EQUAL


async def test_a_remembered_verdict_did_not_wait():
    math = MathEquality(ScriptedPool(EQUAL))
    first = await math.compare(ANSWER, REFERENCE)()
    again = math.compare(ANSWER, REFERENCE)
    assert first.queued_seconds == 0.25 and isinstance(again, Equality) and again.queued_seconds == 0.0


@pytest.mark.parametrize(
    ("first", "found"),
    [
        (TaskTimedOut(1.0, reference_read=True), Relation.TIMED_OUT),
        ({"event": "out_of_memory"}, Relation.OUT_OF_MEMORY),
    ],
)
async def test_what_may_be_the_machines_fault_is_asked_anew(first, found):
    math = MathEquality(ScriptedPool(first, EQUAL))
    assert await relation(math) is found
    assert await relation(math) is Relation.EQUAL


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([TaskTimedOut(1.0, reference_read=False)], reward_pb2.FAILURE_KIND_BAD_REFERENCE),
        ([{"event": "bad_reference", "reason": "for a test"}], reward_pb2.FAILURE_KIND_BAD_REFERENCE),
        ([{"event": "failed", "reason": "for a test"}], reward_pb2.FAILURE_KIND_VERIFIER_CRASHED),
        ([WorkerDied("once"), WorkerDied("twice")], reward_pb2.FAILURE_KIND_VERIFIER_CRASHED),
    ],
)
async def test_a_failure_is_no_verdict_and_is_not_remembered(script, kind):
    math = MathEquality(ScriptedPool(*script, EQUAL))
    with pytest.raises(VerifierFailure) as caught:
        await relation(math)
    assert caught.value.kind == kind
    assert await relation(math) is Relation.EQUAL


async def test_a_worker_that_dies_is_asked_once_more():
    assert await relation(MathEquality(ScriptedPool(WorkerDied("once"), EQUAL))) is Relation.EQUAL
