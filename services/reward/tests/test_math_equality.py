"""What is remembered of the workers' verdicts, in how many bytes, and what is asked anew."""

import asyncio

import pytest
from quartet.v1 import reward_pb2

from quartet_reward.errors import VerifierFailure
from quartet_reward.math.compare import EqualityPolicy
from quartet_reward.math.equality import Equality, MathEquality, VerdictCache
from quartet_reward.workers.pool import TaskTimedOut, WorkerDied

CORRECT, INCORRECT = reward_pb2.OUTCOME_CORRECT, reward_pb2.OUTCOME_INCORRECT
TIMED_OUT, EXCEEDED = reward_pb2.OUTCOME_TIMED_OUT, reward_pb2.OUTCOME_RESOURCE_EXCEEDED
EQUAL = {"event": "done", "equal": True}
JUDGED = {"event": "judged", "is_text": False}
# Not plain, so that a worker is asked.
REFERENCE, ANSWER = r"\sin^2 x", r"1-\cos^2 x"


class ScriptedPool:
    """Answers in turn with what it was given: a worker's message, or an exception to raise.

    References are judged usable, unless there are `judgments` to answer with first.
    """

    def __init__(self, *script: dict | Exception, judgments: tuple[dict | Exception, ...] = ()):
        self._script = list(script)
        self._judgments = list(judgments)
        self.asked: list[dict] = []
        self.judged = 0

    async def run(self, request: dict) -> dict:
        if "answer" in request:
            self.asked.append(request)
            step = self._script.pop(0)
        else:
            self.judged += 1
            step = self._judgments.pop(0) if self._judgments else JUDGED
        if isinstance(step, Exception):
            raise step
        return step


async def outcome(math: MathEquality, answer: str = ANSWER, policy: EqualityPolicy | None = None) -> int:
    found = math.compare(answer, REFERENCE, policy or EqualityPolicy())
    return (found if isinstance(found, Equality) else await found()).outcome


async def test_a_verdict_is_remembered_by_answer_reference_and_policy():
    pool = ScriptedPool(EQUAL, EQUAL | {"equal": False})
    math = MathEquality(pool)
    assert [await outcome(math) for _ in range(3)] == [CORRECT] * 3
    assert len(pool.asked) == 1 and pool.asked[0]["policy"]["any_names"] is False
    assert await outcome(math, policy=EqualityPolicy(any_names=True)) == INCORRECT
    assert len(pool.asked) == 2 and pool.asked[1]["policy"]["any_names"] is True
    again = math.compare(ANSWER, REFERENCE)
    assert isinstance(again, Equality) and again.outcome == CORRECT


@pytest.mark.parametrize(
    ("first", "found"),
    [
        (TaskTimedOut(1.0), TIMED_OUT),
        ({"event": "out_of_memory"}, EXCEEDED),
    ],
)
async def test_what_may_be_the_machines_fault_is_asked_anew(first, found):
    math = MathEquality(ScriptedPool(first, EQUAL))
    assert await outcome(math) == found
    assert await outcome(math) == CORRECT


@pytest.mark.parametrize(
    ("judgments", "kind"),
    [
        ([{"event": "failed", "reason": "for a test"}], reward_pb2.FAILURE_KIND_VERIFIER_CRASHED),
        ([{"event": "out_of_memory"}], reward_pb2.FAILURE_KIND_BAD_REFERENCE),
        ([WorkerDied("killed")], reward_pb2.FAILURE_KIND_VERIFIER_CRASHED),
    ],
)
async def test_a_failure_that_may_be_the_machines_is_no_verdict_and_is_not_remembered(judgments, kind):
    math = MathEquality(ScriptedPool(EQUAL, judgments=judgments))
    with pytest.raises(VerifierFailure) as caught:
        await outcome(math)
    assert caught.value.kind == kind
    assert await outcome(math) == CORRECT


@pytest.mark.parametrize("judgment", [TaskTimedOut(1.0), {"event": "bad_reference", "reason": "for a test"}])
@pytest.mark.parametrize("answer", ["8", REFERENCE, ""])
async def test_a_reference_is_judged_once_and_alike_for_every_answer(judgment, answer):
    pool = ScriptedPool(judgments=(judgment,))
    math = MathEquality(pool)
    for each in (answer, ANSWER):
        with pytest.raises(VerifierFailure) as caught:
            await outcome(math, each)
        assert caught.value.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE
    assert pool.judged == 1


async def test_an_answer_whose_worker_dies_is_at_fault_unless_that_was_killed_from_outside():
    assert await outcome(MathEquality(ScriptedPool(WorkerDied("signal 11 ended it", crashed=True)))) == EXCEEDED
    with pytest.raises(VerifierFailure) as caught:
        await outcome(MathEquality(ScriptedPool(WorkerDied("signal 9 ended it"))))
    assert caught.value.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED


def test_the_least_lately_used_goes_first_and_bytes_are_bounded():
    cache: VerdictCache[str] = VerdictCache(100_000)
    for question in range(1000):
        cache.put(question, "verdict", 1000)
        assert cache.bytes <= 100_000
        assert cache.get(0) == "verdict" or question > 0 and len(cache) > 1
    assert cache.get(0) == "verdict" and cache.get(1) is None and cache.get(999) == "verdict"
    assert 30 <= len(cache) <= 50


async def test_all_who_ask_share_the_work_and_the_last_cancels_it():
    cache: VerdictCache[str] = VerdictCache(1000)
    begun, cancelled, end = asyncio.Queue(), asyncio.Event(), asyncio.Event()

    async def work() -> str:
        begun.put_nowait("once")
        try:
            await end.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "verdict"

    first, second = (asyncio.create_task(cache.ask("q", work)) for _ in range(2))
    await asyncio.wait_for(begun.get(), 10)
    first.cancel()
    await asyncio.wait({first})
    assert not cancelled.is_set() and not second.done() and begun.empty()
    second.cancel()
    await asyncio.wait_for(cancelled.wait(), 10)
    third = asyncio.create_task(cache.ask("q", work))
    end.set()
    assert await third == "verdict"
