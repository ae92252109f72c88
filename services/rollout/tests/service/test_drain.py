"""SetDrain over a real socket: a rollout leaves its run while its process stays, and comes back."""

import asyncio
from datetime import timedelta

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import broker_pb2, rollout_pb2
from world import instance, refused

WAITS = "the end of its drain (quartet drain --undo)"


def set_drain(world, grace: float = 0.0, draining: bool = True):
    request = rollout_pb2.SetDrainRequest(draining=draining)
    request.grace.FromTimedelta(timedelta(seconds=grace))
    return world.stub.SetDrain(request, timeout=20)


async def test_drain_finishes_groups_within_the_grace_and_the_end_of_it_brings_the_rollout_back(ready):
    ready.engine.hold(1)
    await ready.broker.submit(instance("running"))
    await ready.until(lambda: ready.engine.running > 0)
    draining = asyncio.ensure_future(set_drain(ready, grace=15))
    await ready.broker.until(
        lambda: [member.state for member in ready.broker.members.values()] == [broker_pb2.MEMBER_STATE_DRAINING]
    )
    await ready.broker.submit(instance("later"))
    assert WAITS in (await ready.status()).waiting_for and not draining.done()
    ready.engine.let_go()
    answer = await draining
    assert (answer.run_id, answer.finished, answer.given_back) == ("demo", 1, 0)
    assert not ready.broker.members and not ready.broker.leases and len(ready.broker.puts) == 1
    assert await set_drain(ready) == answer, "a repeated call finds it drained"
    completions = await ready.stub.Generate(rollout_pb2.GenerateRequest(prompt={"text": "x"}), timeout=5)
    assert completions.completions, "its own callers are still answered"

    assert (await set_drain(ready, draining=False)).run_id == "demo"
    # What a request of before brought in the drain was given back (here it stays away).
    await ready.broker.submit(instance("after"))
    await ready.broker.until(lambda: len(ready.broker.puts) == 2)
    assert WAITS not in (await ready.status()).waiting_for and ready.broker.members


async def test_drain_gives_back_what_the_grace_does_not_suffice_for_without_a_failure(ready):
    ready.engine.hold(1)
    await ready.broker.submit(instance("a"), instance("b"))
    await ready.until(lambda: len(ready.engine.requests) == 2)
    answer = await set_drain(ready, grace=0.3)
    assert (answer.finished, answer.given_back) == (0, 2)
    assert [release.failure for release in ready.broker.releases] == ["", ""] and not ready.broker.members


async def test_a_drained_rollout_does_not_register_again_by_itself(ready):
    ready.broker.run.spec.member_ttl.CopyFrom(Duration(nanos=300_000_000))
    await set_drain(ready)
    ready.service.membership.request_heartbeat()
    await asyncio.sleep(0.5)
    assert ready.broker.calls.count("register") == 1 and not ready.broker.members
    assert await ready.stop() == 0


async def test_a_drain_that_is_ended_is_told_to_its_caller_and_changes_nothing(ready):
    ready.engine.hold(1)
    await ready.broker.submit(instance("running"))
    await ready.until(lambda: ready.engine.running > 0)
    draining = asyncio.ensure_future(set_drain(ready, grace=15))
    await ready.until(lambda: WAITS in ready.host.waiting)
    await set_drain(ready, draining=False)
    assert "call again if the rollout is to leave" in await refused(draining, grpc.StatusCode.ABORTED)
    ready.engine.let_go()
    await ready.broker.until(lambda: ready.broker.puts)
    assert ready.broker.calls.count("register") == 1 and not ready.broker.releases


async def test_a_call_that_is_cancelled_leaves_the_rollout_draining(ready):
    ready.engine.hold(1)
    await ready.broker.submit(instance("running"))
    await ready.until(lambda: ready.engine.running > 0)
    draining = asyncio.ensure_future(set_drain(ready, grace=1))
    await ready.until(lambda: WAITS in ready.host.waiting)
    draining.cancel()
    await ready.broker.until(lambda: not ready.broker.members)
    assert (await set_drain(ready)).given_back == 1


@pytest.mark.parametrize("grace", [-1, 90_000])
async def test_a_grace_that_is_no_time_is_refused(ready, grace: float):
    assert "grace: got" in await refused(set_drain(ready, grace), grpc.StatusCode.INVALID_ARGUMENT)


async def test_a_rollout_without_a_run_is_drained_at_once(world):
    world.broker.run = None
    await world.start()
    await world.until(lambda: world.service.state.engine is not None)
    answer = await set_drain(world, grace=15)
    assert (answer.run_id, answer.finished, answer.given_back) == ("", 0, 0)
    world.broker.create_run()
    await set_drain(world, draining=False)
    await world.broker.until(lambda: world.broker.members)
