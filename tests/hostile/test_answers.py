"""Hostile answers against the reward service with its real workers: right verdicts in time, others served meanwhile."""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_common.config import load_config
from quartet_common.host import ServiceHost
from quartet_reward.config import RewardSection
from quartet_reward.serving import assemble
from quartet_reward.worker_pool import WorkerPool
from tests.hostile.answers import ANSWERS, HostileAnswer

DEADLINE_SECONDS = 1.0
WORKERS = 2
# A killed worker's successor imports sympy; a call may wait for that on a busy machine.
CALL_SECONDS = 60.0
OWNED = Path("/tmp/quartet_owned")


@dataclass
class Running:
    """The service under test."""

    stub: reward_pb2_grpc.RewardServiceStub
    pool: WorkerPool


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running() -> AsyncIterator[Running]:
    settings = ["addresses.reward=127.0.0.1:0", f"reward.deadline_seconds={DEADLINE_SECONDS}"]
    config = load_config("reward", RewardSection, overrides=[*settings, f"reward.workers={WORKERS}"])
    host = ServiceHost("reward", config.addresses.reward, config.security, config.server)
    resources = assemble(config, host)
    pool = resources.mathematics
    await resources.start()
    await host.start()
    async with grpc.aio.insecure_channel(host.address) as channel:
        yield Running(reward_pb2_grpc.RewardServiceStub(channel), pool)
    await host.drain()
    victims = pool.pids
    await resources.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in victims)


def item_of(completion: str, reference: str, item_id: str = "a") -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(
        item_id=item_id,
        completion=completion,
        reference=reward_pb2.Reference(answer=reference),
        verifiers=[reward_pb2.VerifierSpec(name="math")],
    )


async def score(running: Running, item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
    request = reward_pb2.ScoreRequest(items=[item])
    return (await running.stub.Score(request, timeout=CALL_SECONDS)).results[0]


def seconds_of(result: reward_pb2.ScoreResult) -> float:
    """The verification's own time; that of the queue is not in it."""
    return result.score.elapsed.ToTimedelta().total_seconds()


def test_there_are_enough_and_each_is_named_once():
    assert len(ANSWERS) >= 30
    assert len({answer.name for answer in ANSWERS}) == len(ANSWERS)


def test_each_is_in_the_docs():
    page = (Path(__file__).resolve().parents[2] / "docs" / "math.md").read_text(encoding="utf-8")
    assert [answer.name for answer in ANSWERS if f"| {answer.name} | {answer.tries} |" not in page] == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name.replace(" ", "-"))
async def test_a_hostile_answer_gets_its_verdict_in_time(running: Running, answer: HostileAnswer):
    for _ in range(3):  # a machine that is busy with something else may delay one, not all
        result = await score(running, item_of(answer.completion, answer.reference))
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
    endless = [item_of(rf"\boxed{{(10^{{9}}+{i})!}}", "8", f"endless-{i}") for i in range(6)]
    flood = asyncio.create_task(_flood(running, endless))
    waits = []
    while not flood.done():
        began = time.perf_counter()
        plain = await score(running, item_of(r"\boxed{8}", "8"))
        waits.append(time.perf_counter() - began)
        assert plain.score.outcome == reward_pb2.OUTCOME_CORRECT
        await asyncio.wait((flood,), timeout=0.05)
    results = await flood
    assert {result.score.outcome for result in results} == {reward_pb2.OUTCOME_TIMED_OUT}
    assert statistics.median(map(seconds_of, results)) <= DEADLINE_SECONDS + 0.2  # the wait for a worker is not in it
    assert len(waits) >= 10 and statistics.median(waits) < 0.1, waits
    healthy = await score(running, item_of(r"\boxed{\sqrt{64}}", "8"))
    assert healthy.score.outcome == reward_pb2.OUTCOME_CORRECT
    assert running.pool.busy == 0 and running.pool.waiting == 0


async def _flood(running: Running, items: list[reward_pb2.ScoreItem]) -> list[reward_pb2.ScoreResult]:
    return list((await running.stub.Score(reward_pb2.ScoreRequest(items=items), timeout=CALL_SECONDS)).results)
