"""SetSleep over a real socket: what a rollout does and refuses while somebody else has its memory."""

import grpc
import pytest
from quartet.v1 import rollout_pb2
from world import begin_request, instance, join_request, refused

from quartet_rollout.engines import EngineError


async def set_sleep(world, level: int) -> int:
    return (await world.stub.SetSleep(rollout_pb2.SetSleepRequest(level=level), timeout=5)).policy_version


async def level_of(world) -> int:
    return (await world.stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=5)).sleep_level


@pytest.fixture
async def able(ready):
    """A rollout whose engine can sleep."""
    ready.engine.can_sleep = True
    return ready


async def test_asleep_it_leases_nothing_and_what_was_running_goes_on_afterwards(able):
    able.engine.hold(1)
    await able.broker.submit(instance("running"))
    await able.until(lambda: able.engine.running > 0)
    version = able.service.state.policy_version
    assert await set_sleep(able, 1) == version and await level_of(able) == 1
    await able.broker.submit(instance("later"))
    able.engine.let_go()
    generate = able.stub.Generate(rollout_pb2.GenerateRequest(prompt={"text": "x"}), timeout=5)
    assert "it sleeps" in await refused(generate, grpc.StatusCode.UNAVAILABLE)
    assert len(able.engine.requests) == 1 and not able.broker.puts
    assert await set_sleep(able, 0) == version and await level_of(able) == 0
    # What a request of before brought meanwhile was given back (here it stays away), else it is leased now.
    await able.broker.until(lambda: len(able.broker.puts) + able.broker.calls.count("release") == 2)
    assert able.broker.puts


async def test_each_call_may_be_repeated_and_a_deeper_sleep_begins_awake(able):
    for level in (1, 1, 0, 0, 2):
        await set_sleep(able, level)
    assert "it sleeps at level 2: wake it first" in await refused(
        set_sleep(able, 1), grpc.StatusCode.FAILED_PRECONDITION
    )
    assert able.engine.calls[-5:] == ["sleep 1", "sleep 1", "wake", "wake", "sleep 2"]
    await set_sleep(able, 0)


async def test_weights_and_sleep_exclude_each_other(able):
    await able.stub.JoinWeightGroup(join_request(), timeout=5)
    await set_sleep(able, 1)
    error = await refused(able.stub.BeginWeightUpdate(begin_request(4), timeout=5), grpc.StatusCode.FAILED_PRECONDITION)
    assert "wake it (SetSleep, level 0) before it takes weights" in error
    await set_sleep(able, 0)
    able.engine.arrive.clear()
    await able.stub.BeginWeightUpdate(begin_request(4), timeout=5)
    error = await refused(set_sleep(able, 1), grpc.StatusCode.FAILED_PRECONDITION)
    assert "it is taking new weights" in error and await level_of(able) == 0


async def test_an_engine_that_fails_to_sleep_is_awake(able):
    able.engine.errors["sleep"] = EngineError("no memory on the host")
    assert "no memory on the host" in await refused(set_sleep(able, 1), grpc.StatusCode.UNAVAILABLE)
    assert await level_of(able) == 0
    await able.put(instance("goes on"))


async def test_an_engine_that_cannot_sleep_says_so(ready):
    error = await refused(set_sleep(ready, 1), grpc.StatusCode.UNIMPLEMENTED)
    assert "a rollout with the capability 'sleep'" in error
    await refused(set_sleep(ready, 3), grpc.StatusCode.INVALID_ARGUMENT)
    assert "wake" not in ready.engine.calls
