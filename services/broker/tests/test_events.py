"""The events of a run: what is told, from where, until when."""

import asyncio

import grpc
from world import refused


async def test_watching_goes_on_from_an_id_and_ends_when_there_is_no_more(world):
    await world.create()
    first = await world.report(step={"step": 0})
    second = await world.report(step={"step": 1})
    call = world.watch(after=first)
    assert (await call.read()).event.event_id == second
    third = await world.report(step={"step": 2})
    assert (await call.read()).event.event_id == third
    await world.finish()
    assert (await call.read()).event.HasField("run_state")
    assert await call.read() == grpc.aio.EOF
    last = [response.event async for response in world.watch()][-1].event_id
    assert [response async for response in world.watch(after=last)] == []
    assert [response async for response in world.watch(after="$")] == []


async def test_dollar_means_only_new_ones(world):
    await world.create()
    await world.report(step={"step": 0})
    call = world.watch(after="$")
    reading = asyncio.ensure_future(call.read())
    await asyncio.sleep(0.5)  # let it find its place
    new = await world.report(step={"step": 1})
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
    kinds = [response.event.WhichOneof("event") async for response in world.watch()]
    assert kinds == ["run_state", "member", *["sample"] * 4, "run_state"], "two for each policy version"


async def test_dead_prompts_are_noticed(world):
    await world.create()
    await world.submit("a")
    (lease,) = await world.lease()
    await world.release(lease.lease_id, "prompt too long", permanent=True)
    await world.finish()
    notices = [r.event.notice async for r in world.watch() if r.event.HasField("notice")]
    assert [(n.level, n.text) for n in notices] == [("warning", "prompt a was set aside as dead: prompt too long")]


async def test_what_is_no_event_id_is_refused(world):
    await world.create()
    for bad in ("1-", "-", "1-2-3", "99999999999999999999999999-1"):
        await refused(world.watch(after=bad).read(), grpc.StatusCode.INVALID_ARGUMENT, "after_event_id")
