"""The events of a run: what is told, from where, until when."""

import asyncio

import grpc
import pytest
from quartet.v1 import broker_pb2 as pb
from world import group, refused


def watch(world, after: str = ""):
    return world.stub.WatchRun(pb.WatchRunRequest(run_id=world.run_id, after_event_id=after), timeout=30)


async def report(world, step: int) -> str:
    event = pb.RunEvent(step=pb.StepFinished(step=step, metrics={"loss": 0.5}))
    response = await world.stub.ReportProgress(pb.ReportProgressRequest(run_id=world.run_id, event=event))
    return response.event_id


def kinds(events) -> list[str]:
    return [event.WhichOneof("event") for event in events]


async def test_a_watcher_sees_all_from_the_beginning_to_the_end(world):
    await world.create()
    await report(world, 0)
    await world.finish(pb.RUN_STATE_FAILED, "loss is not a number")
    events = [response.event async for response in watch(world)]
    assert kinds(events) == ["run_state", "member", "step", "run_state"]
    assert events[2].step.metrics["loss"] == 0.5 and events[2].at.ToSeconds() > 1e9
    assert events[3].run_state == pb.RunStateChanged(state=pb.RUN_STATE_FAILED, reason="loss is not a number")
    assert len({event.event_id for event in events}) == 4


async def test_watching_goes_on_from_an_id_and_ends_when_there_is_no_more(world):
    await world.create()
    first = await report(world, 0)
    second = await report(world, 1)
    call = watch(world, after=first)
    assert (await call.read()).event.event_id == second
    third = await report(world, 2)
    assert (await call.read()).event.event_id == third
    await world.finish()
    assert (await call.read()).event.HasField("run_state")
    assert await call.read() == grpc.aio.EOF
    last = [response.event async for response in watch(world)][-1].event_id
    assert [response async for response in watch(world, after=last)] == []
    assert [response async for response in watch(world, after="$")] == []


async def test_dollar_means_only_new_ones(world):
    await world.create()
    await report(world, 0)
    call = watch(world, after="$")
    reading = asyncio.ensure_future(call.read())
    await asyncio.sleep(0.5)  # let it find its place
    new = await report(world, 1)
    assert (await reading).event.event_id == new
    call.cancel()


async def test_a_few_groups_of_each_version_are_shown(world):
    await world.create(groups_per_step=4)
    await world.submit(*"abcdefgh")
    await world.open()
    await world.roll_out()
    await world.train(0)
    await world.roll_out(version=1)
    await world.finish()
    events = [response.event async for response in watch(world)]
    assert kinds(events).count("sample") == 4, "two for each policy version"


async def test_dead_prompts_are_noticed(world):
    await world.create()
    await world.submit("a")
    (lease,) = await world.lease()
    await world.release(lease.lease_id, "prompt too long", permanent=True)
    await world.finish()
    notices = [r.event.notice async for r in watch(world) if r.event.HasField("notice")]
    assert [(n.level, n.text) for n in notices] == [("warning", "prompt a was set aside as dead: prompt too long")]


async def test_run_state_events_and_bad_ids_are_refused(world):
    await world.create()
    for event in (pb.RunEvent(), pb.RunEvent(run_state=pb.RunStateChanged(state=pb.RUN_STATE_FAILED))):
        await refused(
            world.stub.ReportProgress(pb.ReportProgressRequest(run_id=world.run_id, event=event)),
            grpc.StatusCode.INVALID_ARGUMENT,
        )
    for bad in ("yesterday", "1-", "-", "1-2-3", "99999999999999999999999999-1"):
        with pytest.raises(grpc.RpcError) as caught:
            await watch(world, after=bad).read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, bad


async def test_a_put_group_is_not_an_event_beyond_the_samples(world):
    await world.create(groups_per_step=8)
    await world.submit(*"abcdef")
    for lease in await world.lease():
        await world.put(group(lease))
    assert await world.redis.xlen(f"q:{{{world.run_id}}}:events") == 2 + 2
