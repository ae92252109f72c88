"""Completions that a verifier failed on: kept with the dead prompt, granted for scoring, let go when a group is put."""

import grpc
from conftest import on_both
from world import group, refused

from quartet_broker import keys

pytestmark = on_both

KEPT = b"an UnscoredGroup" * 10


async def set_aside(world, lease, kept: bytes = KEPT) -> None:
    assert (await world.release(lease.lease_id, "it raised", permanent=True, unscored=kept)).dead == 1


async def unscored(world, name: str) -> bytes:
    return (await world.call("GetUnscored", instance_id=name)).unscored


async def contents(world) -> int:
    """Groups whose contents stand in Redis."""
    return len(await world.redis.keys(keys.prefix(world.run_id) + "payload:*"))


async def test_completions_are_kept_until_a_group_is_put(world):
    await world.create()
    await world.submit("a")
    (lease,) = await world.lease()
    assert not lease.unscored
    await set_aside(world, lease)
    (dead,) = (await world.call("ListDead")).dead
    assert (dead.unscored_bytes, list(dead.reasons)) == (len(KEPT), ["it raised"])
    assert await unscored(world, "a") == KEPT
    assert (await world.stats()).experience_bytes == len(KEPT)
    assert not await world.faults()

    assert await world.requeue_dead() == 1
    (lease,) = await world.lease()
    assert lease.unscored and lease.attempt == 1 and await unscored(world, "a") == KEPT
    await world.release(lease.lease_id)
    (lease,) = await world.lease()
    assert lease.unscored, "given back, they stay"
    await world.expire_leases()
    (lease,) = await world.lease()
    assert lease.unscored, "expired, they stay"
    await set_aside(world, lease, KEPT + b"2")
    assert await world.requeue_dead() == 1 and await unscored(world, "a") == KEPT + b"2"
    (lease,) = await world.lease()
    assert not await world.faults()
    assert await world.put(group(lease)) == ["ACCEPTED"]
    assert await contents(world) == 1
    await refused(unscored(world, "a"), grpc.StatusCode.NOT_FOUND)
    assert not await world.faults()


async def test_without_room_the_prompt_dies_without_them_and_says_so(world):
    await world.create(max_experience_bytes=1 << 20, groups_per_step=3)
    await world.submit("a", "b", "c")
    for lease, kib in zip(await world.lease(), (600, 600, 400), strict=True):
        await set_aside(world, lease, bytes(kib << 10))
    dead = (await world.call("ListDead")).dead
    assert [prompt.unscored_bytes for prompt in dead] == [600 << 10, 0, 400 << 10]
    remark = "its 614400 bytes of completions are not kept: others that wait for a score hold 614400 of 1048576"
    assert list(dead[1].reasons) == [f"it raised; {remark}"]
    assert not await world.faults()


async def test_a_resumed_trainer_has_them_scored_again_and_leaves_the_other_dead(world):
    await world.create()
    await world.submit("a", "b")
    a, b = await world.lease()
    await set_aside(world, a)
    await world.release(b.lease_id, "prompt too long", permanent=True)
    await world.open()
    assert await world.state_of("a") == "QUEUED" and await world.state_of("b") == "DEAD"
    events = world.call("WatchRun")
    async for answer in events:
        if answer.event.notice.text == "1 group that no verifier could score will be scored again":
            break
    events.cancel()
    (lease,) = await world.lease()
    assert lease.unscored
    await world.finish()
    await world.open()
