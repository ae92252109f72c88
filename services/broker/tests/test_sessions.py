"""The trainer's side: batches, fencing, replay, commit, the end of the data."""

import asyncio

import pytest
from quartet.v1 import broker_pb2 as pb
from world import group, refused


@pytest.mark.parametrize("sizes", [[100] * 8 + [5 << 20] * 2, [5 << 20, 100, 100, 5 << 20, 3 << 20]])
async def test_groups_of_uneven_sizes_come_in_messages_that_fit(world, sizes):
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


async def test_an_older_session_is_fenced_from_every_call(world):
    await world.create()
    assert "call OpenSession first" in await refused(world.take(0, session=0))
    await world.submit(*"ab")
    await world.roll_out()
    old = (await world.open()).session_epoch
    assert (await world.open()).session_epoch > old
    await world.batch(0)
    assert "fenced" in await refused(world.take(0, session=old))
    assert "fenced" in await refused(world.trained(0, session=old))
    assert "fenced" in await refused(world.commit(0, session=old))
    assert await world.trained(0) == 1


async def test_steps_come_in_order(world):
    await world.create(max_staleness=4)
    await world.submit(*"abcd")
    await world.open()
    await world.roll_out()
    assert "step 0" in await refused(world.take(1))
    assert "not granted" in await refused(world.trained(0))
    await world.batch(0)
    await world.batch(1)
    assert "is at step 0" in await refused(world.trained(1))
    assert "is at step 0" in await refused(world.commit(1))
    assert [await world.trained(0), await world.trained(0), await world.trained(1)] == [1, 1, 2]
    assert [await world.commit(1), await world.commit(1), await world.commit(2)] == [2, 0, 2]
    assert "committed" in await refused(world.take(1))
    assert "committed up to step 2" in await refused(world.open(checkpoint=1))


async def test_a_crash_between_trained_and_commit_replays_the_same_batches(world):
    await world.create(max_staleness=4)
    await world.submit(*(f"p{n}" for n in range(12)))
    await world.open()
    await world.roll_out()
    batches = []
    for step in range(3):
        batches.append(await world.batch(step))
        await world.trained(step)
    await world.commit(1)
    assert (await world.run()).policy_version == 3

    opened = await world.open(checkpoint=1, consumed=batches[0])
    assert opened.replayable_steps == 2 and opened.run.policy_version == 1
    for step in (1, 2):
        manifest, groups = await world.take(step)
        assert list(manifest.instance_ids) == batches[step] and manifest.replayed
        assert [group.header.instance_id for group in groups] == batches[step]
        await world.trained(step)
    assert await world.commit(3) == 4
    stats = await world.stats()
    assert (stats.committed, stats.trained, stats.leased_to_trainer) == (6, 0, 0)


async def test_what_a_checkpoint_consumed_is_not_trained_again_wherever_a_forgetful_redis_has_it(world):
    """As after a lost end of the log: the broker knows nothing of steps 0 to 4, which the checkpoint contains."""
    await world.create(max_staleness=4, groups_per_step=2)
    await world.submit("queued", "leased", "ready", "dead", "x1", "batched", "x2", "x3")
    await world.open()
    (first,) = await world.lease(1)
    assert first.instance.instance_id == "queued"
    await world.release(first.lease_id)
    leases = {lease.instance.instance_id: lease for lease in await world.lease()}
    await world.release(leases["queued"].lease_id)
    await world.release(leases["dead"].lease_id, "broken", permanent=True)
    await world.put(*(group(leases[name]) for name in ("x1", "batched")))
    assert await world.batch(0) == ["x1", "batched"]
    await world.put(*(group(leases[name]) for name in ("ready", "x2", "x3")))

    consumed = ["queued", "leased", "ready", "dead", "batched", "forgotten"]
    await world.open(checkpoint=0, consumed=consumed)
    assert {await world.state_of(name) for name in consumed} == {"COMMITTED"}
    assert await world.put(group(leases["leased"])) == ["DUPLICATE"]
    assert (await world.submit("forgotten", "queued")).duplicates == 2
    assert not await world.lease()
    assert await world.batch(0) == ["x1", "x2"], "the batch is topped up"
    stats = await world.stats()
    assert (stats.queued, stats.leased, stats.ready, stats.dead, stats.leased_to_trainer) == (0, 0, 1, 0, 2)
    assert not await world.faults()


async def test_a_trainer_that_waits_hears_that_the_run_is_finished(world):
    await world.create()
    await world.open()
    waiting = asyncio.create_task(world.take(0, wait=20))
    await asyncio.sleep(0.1)  # let it begin to wait
    await world.finish(pb.RUN_STATE_CANCELLED, "by hand")
    manifest, _ = await waiting
    assert manifest.run_finished and not manifest.granted and not manifest.end_of_data
