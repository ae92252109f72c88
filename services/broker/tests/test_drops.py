"""Groups that the trainer drops: accounted, replaced one for one, and never in the way of an end."""

import asyncio

import pytest
from quartet.v1 import broker_pb2 as pb

DROP, TRAIN = pb.PARTIAL_BATCH_POLICY_DROP, pb.PARTIAL_BATCH_POLICY_TRAIN


@pytest.mark.parametrize("policy", [DROP, TRAIN])
async def test_a_trainer_that_waits_for_a_refill_hears_that_there_is_none(world, policy):
    """The prompts end, and the last one dies, while the trainer waits."""
    await world.create(groups_per_step=2, max_staleness=0, partial_batch=policy, max_deliveries=1)
    await world.submit(*"abc")
    await world.open()
    await world.roll_out()
    await world.batch(0)
    await world.drop(0, "a")
    (lease,) = await world.lease()
    waiting = asyncio.create_task(world.take(0, wait=25))
    await world.end_prompts()
    await world.release(lease.lease_id, "broken", permanent=True)
    async with asyncio.timeout(20):
        manifest, _ = await waiting
    if policy == TRAIN:
        assert list(manifest.instance_ids) == ["b"] and manifest.end_of_data
    else:
        assert not manifest.granted and manifest.end_of_data
    assert not await world.faults()
