"""Staleness and backpressure: who is let in, who is let go."""

import pytest
from quartet.v1 import broker_pb2 as pb
from world import group, refused


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("dropped", [0, 1, 4])
async def test_the_gate_lets_in_what_max_staleness_allows_and_as_many_as_were_dropped(world, staleness, dropped):
    per_step = 4
    await world.create(groups_per_step=per_step, max_staleness=staleness, max_queued_prompts=100)
    await world.submit(*(f"p{n:02}" for n in range(40)))
    await world.open()
    assert len(await world.roll_out()) == per_step * (staleness + 1)
    batch = await world.batch(0)
    shut = await world.ask()
    assert not shut.leases and shut.gate == pb.GATE_REASON_STALENESS
    if dropped:
        await world.drop(0, *batch[:dropped])
        assert len(await world.roll_out()) == dropped
        assert not await world.names(), "and shut again"
        assert "not whole" in await refused(world.trained(0))
    topped_up = await world.batch(0)
    assert len(topped_up) == per_step and topped_up[: per_step - dropped] == batch[dropped:]
    await world.trained(0)
    assert "final" in await refused(world.drop(0, topped_up[0]))
    assert not await world.names(version=0), "older weights than the newest are not let in"
    assert len(await world.roll_out(version=1)) == per_step
    assert (await world.stats()).stale == 0
    assert not await world.faults()


async def test_a_byte_limit_below_one_batch_does_not_stop_the_run(world):
    await world.create(max_staleness=8, groups_per_step=2, max_experience_bytes=1)
    await world.submit(*"abcd")
    await world.open()
    for step in range(2):
        leases = await world.lease(2, version=step)
        assert await world.put(*(group(lease, step, size=1_000) for lease in leases)) == ["ACCEPTED"] * 2
        await world.train(step)
