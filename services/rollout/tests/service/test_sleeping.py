"""SetSleep over a real socket: what a rollout does and refuses while somebody else has its memory."""

import asyncio
import gc
from datetime import timedelta

import grpc
import pytest
from quartet.v1 import rollout_pb2
from world import instance, refused

from quartet_rollout.engines import EngineError


async def set_sleep(world, level: int, seconds: float = 0.0) -> int:
    request = rollout_pb2.SetSleepRequest(level=level)
    if seconds:
        request.timeout.FromTimedelta(timedelta(seconds=seconds))
    return (await world.stub.SetSleep(request, timeout=5)).policy_version


async def level_of(world) -> int:
    return (await world.status()).sleep_level


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
    error = await refused(set_sleep(able, 1), grpc.StatusCode.FAILED_PRECONDITION)
    assert "it sleeps at level 2: wake it first" in error
    assert able.engine.calls[-5:] == ["sleep 1", "sleep 1", "wake", "wake", "sleep 2"]


async def test_weights_that_come_asleep_wake_it_and_nothing_is_generated_with_the_old_ones(able):
    await able.join()
    able.engine.hold(1)
    await able.broker.submit(instance("running"))
    await able.until(lambda: able.engine.tokens_total > 0)
    await set_sleep(able, 1)
    able.engine.let_go()
    tokens = able.engine.tokens_total
    for_ever = able.begin(4, pause_mode=rollout_pb2.PAUSE_MODE_WAIT)
    error = await refused(for_ever, grpc.StatusCode.FAILED_PRECONDITION)
    assert "pause_mode: it sleeps, so no completion can end: allowed: keep, abort" in error
    await able.begin(4)
    error = await refused(set_sleep(able, 1), grpc.StatusCode.FAILED_PRECONDITION)
    assert "a weight update is in progress" in error and await level_of(able) == 1
    able.engine.calls.clear()
    assert able.engine.tokens_total == tokens
    await able.finish(4)
    assert able.engine.calls == ["pause keep False", "wake", "install 4", "resume"] and await level_of(able) == 0
    await able.broker.until(lambda: able.broker.puts)


async def test_an_engine_that_does_not_wake_delays_the_end_of_an_update_by_its_deadline(able, monkeypatch):
    await able.join()
    await set_sleep(able, 1)
    with monkeypatch.context() as patch:
        patch.setattr(able.engine, "wake", asyncio.Event().wait)
        await able.begin(4, seconds=0.2)
        await refused(able.finish(4), grpc.StatusCode.ABORTED)
    assert await level_of(able) == 1
    await set_sleep(able, 0)
    await able.put(instance("goes on"))


async def test_a_trainer_that_is_gone_is_not_waited_for(able):
    await set_sleep(able, 1, 0.05)
    await able.until(lambda: able.engine.calls[-2:] == ["sleep 1", "wake"])
    await able.put(instance("goes on"))
    able.engine.errors["wake"] = EngineError("its memory is not free yet")
    await set_sleep(able, 1, 0.05)
    await able.until(lambda: able.engine.calls[-3:] == ["sleep 1", "wake", "wake"])  # it tries again
    assert await level_of(able) == 1
    del able.engine.errors["wake"]
    await able.until(lambda: able.service.state.sleep_level == 0)


async def test_a_call_that_its_trainer_cancels_still_sets_the_level_and_its_timer(able, monkeypatch, caplog):
    begun, end, sleep = asyncio.Event(), asyncio.Event(), able.engine.sleep

    async def slow_sleep(level: int) -> None:
        begun.set()
        await end.wait()
        await sleep(level)

    monkeypatch.setattr(able.engine, "sleep", slow_sleep)

    async def cancelled_call() -> None:
        begun.clear()
        end.clear()
        request = rollout_pb2.SetSleepRequest(level=1)
        request.timeout.FromMilliseconds(50)
        call = able.stub.SetSleep(request, timeout=5)
        await begun.wait()
        call.cancel()
        await able.status()  # the server has seen the cancellation
        end.set()

    await cancelled_call()
    await able.until(lambda: able.engine.calls[-2:] == ["sleep 1", "wake"])
    await able.put(instance("goes on"))
    able.engine.errors["sleep"] = EngineError("no memory on the host")
    await cancelled_call()
    await able.until(lambda: able.service.state.sleep_level == 0)
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_an_engine_that_fails_to_sleep_is_awake_and_one_that_cannot_says_so(ready):
    error = await refused(set_sleep(ready, 1), grpc.StatusCode.UNIMPLEMENTED)
    assert "a rollout with the capability 'sleep'" in error
    ready.engine.can_sleep = True
    for error in (EngineError("no memory on the host"), KeyError("no memory on the host")):
        ready.engine.errors["sleep"] = error
        assert "no memory on the host" in await refused(set_sleep(ready, 1), grpc.StatusCode.UNAVAILABLE)
        assert await level_of(ready) == 0
    await ready.put(instance("goes on"))
