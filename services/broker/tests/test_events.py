"""The events of a run: what the broker adds to them."""

import grpc
from world import refused


async def test_a_few_groups_of_each_version_and_dead_prompts_are_shown(world):
    await world.create(groups_per_step=4)
    await world.submit(*"abcdefgh")
    await world.open()
    await world.generate(4)
    await world.train(0)
    (lease,) = await world.lease(1, version=1)
    await world.release(lease.lease_id, "prompt too long", permanent=True)
    await world.generate(version=1)
    await world.finish()
    events = [response.event async for response in world.watch()]
    kinds = [event.WhichOneof("event") for event in events]
    two = ["sample"] * 2  # for each policy version
    assert kinds == ["run_state", "member", *two, "notice", *two, "run_state"]
    notice = events[4].notice
    assert (notice.level, notice.text) == ("warning", "prompt e was set aside as dead: prompt too long")
    assert [response async for response in world.watch(after=events[-1].event_id)] == []
    last = 2**64 - 1  # Redis has no entry after it
    await refused(world.watch(after=f"{last}-{last}").read(), grpc.StatusCode.INVALID_ARGUMENT, "after_event_id")
