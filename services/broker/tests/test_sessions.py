"""The trainer's side: batches, fencing, replay, commit, the end of the data."""

import asyncio

import pytest
from quartet.v1 import broker_pb2 as pb
from world import SERVE, group, refused


async def test_groups_of_uneven_sizes_come_in_messages_that_fit(world):
    sizes = [5 << 20, *[100] * 8, 5 << 20, 3 << 20]
    await world.create(groups_per_step=len(sizes))
    await world.submit(*(f"{n}" for n in range(len(sizes))))
    await world.open()
    groups = {}
    for size in sizes:
        (lease,) = await world.lease(1)
        put = group(lease)
        put.group.tensors = bytes(range(100)) * (size // 100)
        await world.put(put)
        groups[lease.instance.instance_id] = put.group
    for _ in ("as it is granted", "again"):
        manifest, messages = await world.take(0, most=256)
        expected = [groups[name] for name in manifest.instance_ids]
        assert [each for message in messages for each in message] == expected
        assert (await world.take(0))[1] == expected
        assert all(len(message) == 1 or sum(each.ByteSize() for each in message) <= 2 << 20 for message in messages)


async def test_whoever_waits_hears_that_the_run_is_finished(world, waiting):
    await world.create()
    await world.submit("s", purpose=SERVE)
    await world.open()
    batch = asyncio.create_task(world.take(0, wait=20))
    result = asyncio.ensure_future(world.call("CollectResults", instance_ids=["s"]).read())
    await waiting(2)
    await world.finish(pb.RUN_STATE_CANCELLED, "by hand")
    manifest, _ = await batch
    assert manifest.run_finished and not manifest.granted and not manifest.end_of_data
    await refused(result)


@pytest.mark.parametrize("policy", [pb.PARTIAL_BATCH_POLICY_DROP, pb.PARTIAL_BATCH_POLICY_TRAIN])
async def test_a_trainer_that_waits_for_a_refill_hears_that_there_is_none(world, policy):
    """The prompts end, and the last one dies, while the trainer waits."""
    await world.create(groups_per_step=2, max_staleness=0, partial_batch=policy, max_deliveries=1)
    await world.submit(*"abc")
    await world.open()
    await world.generate()
    await world.batch(0)
    await world.drop(0, "a")
    (lease,) = await world.lease()
    waiting = asyncio.create_task(world.take(0, wait=25))
    await world.end_prompts()
    await world.release(lease.lease_id, "broken", permanent=True)
    async with asyncio.timeout(20):
        manifest, _ = await waiting
    if policy == pb.PARTIAL_BATCH_POLICY_TRAIN:
        assert list(manifest.instance_ids) == ["b"] and manifest.end_of_data
    else:
        assert not manifest.granted and manifest.end_of_data
    assert not await world.faults()
