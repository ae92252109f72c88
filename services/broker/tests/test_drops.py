"""Groups that the trainer drops: accounted, replaced one for one, and never in the way of an end."""

import asyncio

import pytest
from quartet.v1 import broker_pb2 as pb
from test_history import look

DROP, TRAIN = pb.PARTIAL_BATCH_POLICY_DROP, pb.PARTIAL_BATCH_POLICY_TRAIN


async def test_drops_are_counted_once_and_free_their_bytes(world):
    await world.create(groups_per_step=3)
    await world.submit(*"abcd")
    await world.open()
    await world.roll_out()
    await world.batch(0)
    before = await world.stats()
    assert await world.drop(0, "a", "c", "nobody") == 2
    assert await world.drop(0, "a", "c") == 0, "a repeated call changes nothing"
    stats = await world.stats()
    assert (stats.dropped, stats.leased_to_trainer, stats.committed) == (2, 1, 0)
    assert stats.experience_bytes * 3 == before.experience_bytes
    assert await world.state_of("a") == "DROPPED"
    assert (await look(world, "a")).moments[-1].reason == "zero variance"
    again = await world.submit("a")
    assert (again.accepted, again.duplicates) == (0, 1), "dropped for good"
    assert not await world.faults()


@pytest.mark.parametrize("policy", [DROP, TRAIN])
async def test_an_epoch_that_ends_with_drops_ends(world, policy):
    await world.create(groups_per_step=2, max_staleness=0, partial_batch=policy)
    await world.submit(*"abcde")
    await world.end_prompts()
    await world.open()
    await world.roll_out()
    assert await world.batch(0) == ["a", "b"]
    await world.drop(0, "b")
    await world.roll_out()
    assert await world.batch(0) == ["a", "c"]
    await world.trained(0)
    await world.roll_out(version=1)
    assert await world.batch(1) == ["d", "e"]
    await world.drop(1, "d")
    manifest, _ = await world.take(1, wait=20)  # comes at once: nothing is under way any more
    if policy == TRAIN:
        assert (manifest.granted, list(manifest.instance_ids), manifest.end_of_data) == (True, ["e"], True)
        await world.trained(1)
        manifest, _ = await world.take(2, wait=20)
    assert not manifest.granted and manifest.end_of_data
    step = 2 if policy == TRAIN else 1
    await world.commit(step)
    stats = await world.stats()
    assert (stats.committed, stats.dropped) == ((3, 2) if policy == TRAIN else (2, 3))
    assert stats.queued == stats.leased == stats.ready == stats.leased_to_trainer == stats.trained == 0
    assert not await world.faults()


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
