"""The events of a run: what is told, from where, until when."""

import asyncio

import grpc
from quartet.v1 import broker_pb2 as pb
from world import refused


def watch(world, after: str = ""):
    return world.call("WatchRun", after_event_id=after)


async def report(world, step: int) -> str:
    event = pb.RunEvent(step=pb.StepFinished(step=step, metrics={"loss": 0.5}))
    response = await world.call("ReportProgress", event=event)
    return response.event_id


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
    kinds = [response.event.WhichOneof("event") async for response in watch(world)]
    assert kinds == ["run_state", "member", *["sample"] * 4, "run_state"], "two for each policy version"


async def test_dead_prompts_are_noticed(world):
    await world.create()
    await world.submit("a")
    (lease,) = await world.lease()
    await world.release(lease.lease_id, "prompt too long", permanent=True)
    await world.finish()
    notices = [r.event.notice async for r in watch(world) if r.event.HasField("notice")]
    assert [(n.level, n.text) for n in notices] == [("warning", "prompt a was set aside as dead: prompt too long")]


async def test_what_is_no_event_id_is_refused(world):
    await world.create()
    for bad in ("1-", "-", "1-2-3", "99999999999999999999999999-1"):
        await refused(watch(world, after=bad).read(), grpc.StatusCode.INVALID_ARGUMENT, "after_event_id")
