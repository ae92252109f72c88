"""Score streams that break: an item that breaks each of them ends as a failure, and nothing else does."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from world import instance

from quartet_common import outage
from quartet_common.ports import free_ports

FAST = {"attempts": 2, "backoff_seconds": 0.01}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(outage, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(outage, "LONGEST_RETRY_SECONDS", 0.1)


async def test_an_item_that_breaks_its_stream_is_a_failure_and_the_others_get_their_scores(world):
    world.reward.breaks_on = "poison"
    world.broker.create_run(group_size=1)
    await world.start(scoring=FAST)
    names = {f"i{n}" for n in range(4)}
    await world.broker.submit(*map(instance, names), instance("poison", text="poison"))
    await world.broker.until(lambda: world.broker.releases and len(world.broker.puts) == len(names))
    assert {put.group.header.instance_id for put in world.broker.puts} == names
    (release,) = world.broker.releases
    assert release.permanent and release.unscored, "it waits for a mended service with its completions"
    assert release.failure.startswith("the score stream broke under it alone: INTERNAL: ")
    assert release.failure.endswith("(attempt 2 of 2)")


async def test_a_service_that_is_killed_costs_no_attempt_but_for_the_item_that_kills_it(world):
    world.broker.create_run(group_size=1)
    world.reward_host = SimpleNamespace(address=f"127.0.0.1:{free_ports(1)[0]}")
    command = [sys.executable, str(Path(__file__).with_name("reward_process.py")), world.reward_host.address, "2"]
    process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
    try:
        await world.start(scoring={**FAST, "attempts": 1})
        await world.put(*(instance(f"twice killed {n}") for n in range(5)), timeout=60)
        assert not world.broker.releases and {put.group.header.reward_mean for put in world.broker.puts} == {3.0}
        await world.broker.submit(*(instance(f"beside it {n}") for n in range(4)), instance("poison", text="poison"))
        await world.broker.until(lambda: world.broker.releases and len(world.broker.puts) == 9, timeout=60)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    (release,) = world.broker.releases
    assert release.permanent and release.unscored
    assert release.failure.startswith("the score stream broke under it alone: UNAVAILABLE")


async def test_streams_that_are_refused_are_no_attempts(world):
    world.reward.refusals = 3
    await world.start(scoring=FAST)
    await world.put(instance())
    assert not world.reward.refusals and not world.broker.releases


@pytest.mark.parametrize("reward", [float("nan"), 1e39])
async def test_a_score_that_is_no_float32_is_a_failure_and_never_a_reward(world, reward):
    world.reward.reward = reward
    await world.start(scoring=FAST)
    release = await world.release(instance())
    assert f"the reward service answered reward {reward:g}; allowed: " in release.failure
    assert not world.broker.puts
