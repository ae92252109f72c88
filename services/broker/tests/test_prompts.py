"""Prompts: expired leases, dead letters."""

import asyncio

import pytest
from quartet.v1 import broker_pb2 as pb
from world import SERVE, TRAIN

from quartet_common.durations import to_duration


async def test_the_sweeper_returns_expired_leases_by_itself(world):
    await world.create(prompt_lease_ttl=to_duration(0.05))
    await world.submit("a")
    await world.lease()
    async with asyncio.timeout(15):
        (lease,) = await world.lease(wait=20)
    assert lease.attempt == 2


async def test_dead_prompts_can_be_asked_for_by_name(world):
    await world.create(max_staleness=9)
    await world.submit(*"abcd")
    for lease in await world.lease(3):
        await world.release(lease.lease_id, f"no {lease.instance.instance_id}", permanent=True)
    answer = await world.call("ListDead", instance_ids=["c", "a", "c", "d", "never"])
    assert [dead.instance.instance_id for dead in answer.dead] == ["a", "c"] and answer.total == 3


async def _kill(world, names: list[str], reason: str = "line {} is too long", purpose: int = TRAIN) -> None:
    await world.submit(*names, purpose=purpose)
    for n, lease in enumerate(await world.lease()):
        await world.release(lease.lease_id, reason.format(n), permanent=True)


async def test_the_first_twenty_prompts_that_die_of_one_reason_end_the_run(world):
    await world.create(groups_per_step=64)
    await _kill(world, [f"s{n}" for n in range(20)], purpose=SERVE)
    await _kill(world, [f"a{n}" for n in range(19)])
    assert (await world.run()).state == pb.RUN_STATE_ACTIVE
    await _kill(world, ["last"])
    run = await world.run()
    assert (run.state, run.ending) == (pb.RUN_STATE_FAILED, pb.RUN_ENDING_DEAD_PROMPTS)
    assert run.reason == "the first 20 prompts died of one reason, and no group was made: line 0 is too long"
    assert (run.stats.dead, run.stats.dead_training) == (40, 20)


@pytest.mark.broker(max_first_dead=2)
async def test_prompts_that_die_by_expired_leases_end_the_run_as_well(world):
    await world.create(max_deliveries=1)
    await world.submit("a", "b")
    assert len(await world.lease()) == 2
    await world.expire_leases()
    async with asyncio.timeout(20):
        async for response in world.watch():
            last = response.event
    assert last.run_state.state == pb.RUN_STATE_FAILED
    assert last.run_state.reason.endswith("no group was made: the lease of r1 expired")
