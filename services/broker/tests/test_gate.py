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


async def test_a_group_put_too_late_is_stale_and_its_prompt_is_generated_again(world):
    await world.create(max_staleness=1, groups_per_step=1)
    await world.submit(*"abcd")
    await world.open()
    late, other = await world.lease(2)
    assert await world.put(group(other, version=0)) == ["ACCEPTED"]
    await world.train(0)
    assert await world.roll_out(1, version=1) == ["c"]
    await world.train(1)
    assert await world.put(group(late, version=0)) == ["STALE"]
    assert await world.state_of("a") == "QUEUED"
    (lease,) = await world.lease(1, version=2)
    assert lease.instance.instance_id == "a" and lease.attempt == 1, "it is not to blame"
    assert (await world.stats()).stale == 1


async def test_groups_too_old_for_the_step_are_evicted_when_the_trainer_leases(world):
    await world.create(max_staleness=1, groups_per_step=1, lease_order=pb.LEASE_ORDER_FRESH_FIRST)
    await world.submit(*"abcdef")
    await world.open()
    assert await world.roll_out() == ["a", "b"]
    await world.train(0)
    assert await world.roll_out(1, version=1) == ["c"]
    assert await world.batch(1) == ["c"], "fresh first"
    await world.trained(1)
    assert await world.roll_out(1, version=2) == ["d"]
    assert await world.batch(2) == ["d"]
    stats = await world.stats()
    assert stats.stale == 1 and await world.state_of("b") == "QUEUED"
    kept = [int(await world.redis.hget(f"q:{{{world.run_id}}}:i:{name}", "bytes")) for name in "acd"]
    assert stats.experience_bytes == sum(kept)


async def test_fifo_gives_the_oldest_ready_first(world):
    await world.create(max_staleness=4, groups_per_step=2)
    await world.submit(*"abcd")
    await world.open()
    a, b, c, d = await world.lease()
    for lease in (c, a, d, b):
        await world.put(group(lease))
    assert await world.batch(0) == ["c", "a"]
    assert await world.batch(1) == ["d", "b"]


async def test_the_byte_limit_shuts_the_gate_and_refuses_but_never_starves_a_batch(world):
    await world.create(max_staleness=8, groups_per_step=2, max_experience_bytes=5_000)
    await world.submit(*"abcdefgh")
    await world.open()
    a, b, c, d = await world.lease(4)
    big = {"size": 2_000}
    assert await world.put(group(a, **big), group(b, **big)) == ["ACCEPTED"] * 2
    assert await world.put(group(c, **big)) == ["NO_ROOM"]
    assert await world.state_of("c") == "LEASED", "the lease stands"
    shut = await world.ask()
    assert not shut.leases and shut.gate == pb.GATE_REASON_MEMORY
    await world.train(0)
    assert await world.put(group(c, **big), group(d, **big)) == ["ACCEPTED"] * 2
    await world.train(1)
    assert await world.names(version=2), "what is trained does not count: only a commit would free it"


async def test_a_byte_limit_below_one_batch_does_not_stop_the_run(world):
    await world.create(max_staleness=8, groups_per_step=2, max_experience_bytes=1)
    await world.submit(*"abcd")
    await world.open()
    for step in range(2):
        leases = await world.lease(2, version=step)
        assert await world.put(*(group(lease, step, size=1_000) for lease in leases)) == ["ACCEPTED"] * 2
        await world.train(step)
