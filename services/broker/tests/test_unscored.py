"""Completions that a verifier failed on: kept with the dead prompt, granted for scoring, let go when a group is put."""

import grpc
from conftest import on_both
from world import group, refused

pytestmark = on_both

KEPT = b"an UnscoredGroup" * 10


async def set_aside(world, lease) -> None:
    assert (await world.release(lease.lease_id, "it raised", permanent=True, unscored=KEPT)).dead == 1


async def unscored(world, name: str) -> bytes:
    return (await world.call("GetUnscored", instance_id=name)).unscored


async def test_completions_are_kept_until_a_group_is_put(world):
    await world.create()
    await world.submit("a")
    (lease,) = await world.lease()
    await set_aside(world, lease)
    assert await unscored(world, "a") == KEPT
    await world.requeue_dead()
    (lease,) = await world.lease()
    await world.expire_leases()
    (lease,) = await world.lease()
    assert lease.unscored and await unscored(world, "a") == KEPT, "they stay"
    assert await world.put(group(lease)) == ["ACCEPTED"]
    await refused(unscored(world, "a"), grpc.StatusCode.NOT_FOUND)
    assert not await world.faults()


async def test_a_delivery_that_is_given_back_does_not_count_although_there_is_no_room_for_them(world):
    await world.create(max_experience_bytes=len(KEPT) - 1)
    await world.submit("a")
    for _ in range(2):
        (lease,) = await world.lease()
        assert lease.attempt == 1 and not lease.unscored
        await world.release(lease.lease_id, unscored=KEPT)


async def test_a_resumed_trainer_has_them_scored_again_and_leaves_the_other_dead(world):
    await world.create()
    await world.submit("a", "b")
    a, b = await world.lease()
    await set_aside(world, a)
    await world.release(b.lease_id, "prompt too long", permanent=True)
    await world.open()
    assert await world.state_of("a") == "QUEUED" and await world.state_of("b") == "DEAD"
    (lease,) = await world.lease()
    assert lease.unscored
    await world.finish()
    notices = [answer.event.notice.text async for answer in world.watch()]
    assert "1 group that no verifier could score will be scored again" in notices
