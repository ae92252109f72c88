"""The cache of math workers' verdicts: its keys, its size, what is not cached, and how callers share work."""

import asyncio
from collections.abc import Sequence

import pytest

from quartet_reward import metrics
from quartet_reward.begun import Begun
from quartet_reward.errors import VerifierFailure
from quartet_reward.math.compare import STRICT, EqualityPolicy
from quartet_reward.math.equality import MathEquality, VerdictCache
from quartet_reward.workers.pool import TaskTimedOut
from quartet_server.worker_process import WorkerDied

EQUAL = {"event": "done", "equal": True, "left": ""}
JUDGED = {"event": "judged", "is_text": False}
OUT_OF_MEMORY = {"event": "out_of_memory"}
# Not plain, so that a worker is asked.
REFERENCE, ANSWER = r"\sin^2 x", r"1-\cos^2 x"


class ScriptedPool:
    """A pool whose answers are given: for references and for answers a list each of messages, or exceptions to raise.

    After those, references are usable and answers equal.
    """

    def __init__(self, references: Sequence[dict | Exception] = (), answers: Sequence[dict | Exception] = ()):
        self._references, self._answers = list(references), list(answers)
        self.asked: list[dict] = []
        self.judged = 0

    async def run(self, request: dict) -> dict:
        if "answer" in request:
            self.asked.append(request)
            step = self._answers.pop(0) if self._answers else EQUAL
        else:
            self.judged += 1
            step = self._references.pop(0) if self._references else JUDGED
        if isinstance(step, Exception):
            raise step
        return step


async def found(math: MathEquality, answer: str = ANSWER, policy: EqualityPolicy = STRICT) -> str:
    """The outcome of a comparison, or the kind of its failure."""
    try:
        equality = await math.compare(answer, REFERENCE, policy)
    except VerifierFailure as failure:
        return metrics.failure_name(failure.kind)
    return metrics.outcome_name(equality.outcome)


async def test_a_verdict_is_remembered_by_answer_reference_and_policy():
    pool = ScriptedPool(answers=[EQUAL, EQUAL | {"equal": False}])
    math = MathEquality(pool)
    assert [await found(math) for _ in range(3)] == ["correct"] * 3
    assert len(pool.asked) == 1 and pool.asked[0]["policy"]["any_names"] is False
    assert await found(math, policy=EqualityPolicy(any_names=True)) == "incorrect"
    assert len(pool.asked) == 2 and pool.asked[1]["policy"]["any_names"] is True
    assert Begun(math.compare(ANSWER, REFERENCE)).result is not None


@pytest.mark.parametrize(
    ("of", "first", "what"),
    [
        ("answers", TaskTimedOut(1.0), "timed_out"),
        ("answers", OUT_OF_MEMORY, "resource_exceeded"),
        ("answers", WorkerDied("signal 11 ended it", crashed=True), "resource_exceeded"),
        ("answers", WorkerDied("signal 9 ended it"), "verifier_crashed"),  # which came from outside
        ("answers", {"event": "failed", "reason": "for a test"}, "verifier_crashed"),
        ("references", {"event": "failed", "reason": "for a test"}, "verifier_crashed"),
        ("references", OUT_OF_MEMORY, "bad_reference"),
        ("references", WorkerDied("killed"), "verifier_crashed"),
    ],
)
async def test_what_may_be_the_machines_fault_is_asked_anew(of, first, what):
    math = MathEquality(ScriptedPool(**{of: [first]}))
    assert await found(math) == what
    assert await found(math) == "correct"


@pytest.mark.parametrize("judgment", [TaskTimedOut(1.0), {"event": "bad_reference", "reason": "for a test"}])
@pytest.mark.parametrize("answer", ["8", REFERENCE, ""])
async def test_a_reference_is_judged_once_and_alike_for_every_answer(judgment, answer):
    pool = ScriptedPool(references=[judgment])
    math = MathEquality(pool)
    assert [await found(math, each) for each in (answer, ANSWER)] == ["bad_reference"] * 2
    assert pool.judged == 1


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

    first, second = (asyncio.create_task(cache.compute("q", lambda _: work())) for _ in range(2))
    await asyncio.wait_for(begun.get(), 10)
    first.cancel()
    await asyncio.wait({first})
    assert not cancelled.is_set() and not second.done() and begun.empty()
    second.cancel()
    await asyncio.wait_for(cancelled.wait(), 10)
    third = asyncio.create_task(cache.compute("q", lambda _: work()))
    end.set()
    assert await third == "verdict"


@pytest.mark.parametrize(
    ("reference", "read_as"),
    [("42", "mathematics"), ("east", "mathematics"), (REFERENCE, "mathematics"), ("it is what he said there", "text")],
)
async def test_a_reference_is_counted_by_how_it_reads(reference, read_as):
    counted = metrics.REFERENCES.labels(read_as)
    before = counted._value.get()
    for answer in ("x", None):
        equality = await MathEquality(ScriptedPool()).compare(answer, reference)
        assert equality.reference_is_text == (read_as == "text")
    assert counted._value.get() == before + 2


async def test_an_answer_that_leaves_a_computation_is_unevaluated_with_a_reason():
    math = MathEquality(ScriptedPool(answers=[EQUAL | {"left": "a product"}]))
    found_here, asked = Begun(math.compare("84/2", "42")), Begun(math.compare("17*23", "391"))
    assert asked.result is None
    for equality, left in ((found_here.result, "a quotient"), (await asked, "a product")):
        assert (
            metrics.outcome_name(equality.outcome) == "unevaluated" and f"leaves {left} to compute" in equality.reason
        )
