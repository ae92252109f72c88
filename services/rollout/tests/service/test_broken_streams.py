"""Score streams that break: an item that breaks each of them ends as a failure, and nothing else does."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from world import instance

from quartet_common.outage import Outage
from quartet_common.ports import free_ports
from quartet_rollout import scoring

SERVICE = Path(__file__).with_name("reward_process.py")
FAST = {"attempts": 1, "backoff_seconds": 0.01}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(scoring, "Outage", partial(Outage, first=0.01, longest=0.1))


@asynccontextmanager
async def reward_process(world, short_lives: int):
    """A reward service in processes of its own, each started when the last was killed."""
    world.reward_host = SimpleNamespace(address=f"127.0.0.1:{free_ports(1)[0]}")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVICE), world.reward_host.address, str(short_lives), start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def poison_is_a_failure(world) -> str:
    """Have groups of one completion scored, one of them with poison; return what became of that one."""
    names = [f"i{n}" for n in range(4)]
    await world.broker.submit(*(instance(name) for name in names), instance("poison", text="poison"))
    await world.broker.until(
        lambda: world.broker.releases and {put.group.header.instance_id for put in world.broker.puts} >= set(names),
        timeout=60,
    )
    (release,) = world.broker.releases
    assert release.permanent and release.unscored, "it waits for a mended service with its completions"
    return release.failure


async def test_an_item_that_breaks_its_stream_is_a_failure_and_the_others_get_their_scores(world):
    world.reward.breaks_on = "poison"
    world.broker.create_run(group_size=1)
    await world.start(scoring={**FAST, "attempts": 2})
    failure = await poison_is_a_failure(world)
    assert failure.startswith("the score stream broke under it alone: INTERNAL: ")
    assert failure.endswith("(attempt 2 of 2)")


async def test_a_service_that_is_killed_costs_no_attempt_but_for_the_item_that_kills_it(world):
    world.broker.create_run(group_size=1)
    async with reward_process(world, short_lives=2):
        await world.start(scoring=FAST)
        await world.put(*(instance(f"twice killed {n}") for n in range(5)), timeout=60)
        assert not world.broker.releases and {put.group.header.reward_mean for put in world.broker.puts} == {3.0}
        failure = await poison_is_a_failure(world)
    assert failure.startswith("the score stream broke under it alone: UNAVAILABLE")


async def test_streams_that_are_refused_are_no_attempts(world):
    world.reward.refusals = 3
    await world.start(scoring=FAST)
    await world.put(instance())
    assert not world.reward.refusals and not world.broker.releases


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), 1e39])
async def test_a_score_that_is_no_float32_is_a_failure_and_never_a_reward(world, reward):
    world.reward.reward = reward
    await world.start(scoring=FAST)
    release = await world.release(instance())
    assert f"the reward service answered reward {reward:g}; allowed: " in release.failure
    assert not world.broker.puts
