"""Hostile answers to the reward service with real workers: right verdicts in time, without delays of others."""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from quartet.v1 import reward_pb2
from reward_samples import Running, item, serving

from tests.hostile.answers import ANSWERS, Answer

DEADLINE_SECONDS = 1.0
WORKERS = 2
# A killed worker's successor imports sympy; a call may wait for that on a busy machine.
CALL_SECONDS = 60.0
OWNED = Path("/tmp/quartet_owned")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running() -> AsyncIterator[Running]:
    async with serving(f"reward.deadline_seconds={DEADLINE_SECONDS}", f"reward.workers={WORKERS}") as running:
        yield running
        victims = running.pool.pids
    assert not any(os.path.exists(f"/proc/{pid}") for pid in victims)


async def score(running: Running, *items: reward_pb2.ScoreItem) -> list[reward_pb2.ScoreResult]:
    return list((await running.stub.Score(reward_pb2.ScoreRequest(items=items), timeout=CALL_SECONDS)).results)


def seconds_of(result: reward_pb2.ScoreResult) -> float:
    """The verification's own time; that of the queue is not in it."""
    return result.score.elapsed.ToTimedelta().total_seconds()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name.replace(" ", "-"))
async def test_a_hostile_answer_gets_its_verdict_in_time(running: Running, answer: Answer):
    for _ in range(3):  # a machine that is busy with something else may delay one, not all
        (result,) = await score(running, item(answer.completion, answer.reference, "math"))
        assert result.HasField("score"), result.failure
        assert (result.score.reward > 0) == (result.score.outcome == reward_pb2.OUTCOME_CORRECT)
        if result.score.outcome in answer.allowed and seconds_of(result) <= DEADLINE_SECONDS + 0.2:
            break
        assert result.score.outcome in answer.allowed | {reward_pb2.OUTCOME_TIMED_OUT}, result.score.reason
    assert result.score.outcome in answer.allowed, result.score.reason
    assert seconds_of(result) <= DEADLINE_SECONDS + 0.2
    assert not OWNED.exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_others_wait_a_bounded_time_meanwhile_and_no_worker_hangs(running: Running):
    endless = [item(rf"\boxed{{(10^{{9}}+{i})!}}", verifier="math", item_id=f"endless-{i}") for i in range(4)]
    flood = asyncio.create_task(score(running, *endless))
    waits = []
    while not flood.done():
        began = time.perf_counter()
        (plain,) = await score(running, item(r"\boxed{8}", verifier="math"))
        waits.append(time.perf_counter() - began)
        assert plain.score.outcome == reward_pb2.OUTCOME_CORRECT
        await asyncio.wait((flood,), timeout=0.05)
    results = await flood
    assert {result.score.outcome for result in results} == {reward_pb2.OUTCOME_TIMED_OUT}
    assert statistics.median(map(seconds_of, results)) <= DEADLINE_SECONDS + 0.2  # the wait for a worker is not in it
    assert len(waits) >= 10 and statistics.median(waits) < 0.1, waits
    (healthy,) = await score(running, item(r"\boxed{8 = \sqrt{64}}", verifier="math"))
    assert healthy.score.outcome == reward_pb2.OUTCOME_CORRECT
    assert running.pool.busy == 0 and running.pool.waiting == 0
