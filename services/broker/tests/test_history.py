"""What GetGroup tells of a group's life: every step of it, in order, and after its end as long as it is kept."""

from quartet.v1 import broker_pb2 as pb
from world import SERVE, group

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def look(world, name: str) -> pb.GetGroupResponse:
    return await world.call("GetGroup", instance_id=name)


async def kinds(world, name: str) -> list[str]:
    found = (await look(world, name)).moments
    times = [moment.at.ToMilliseconds() for moment in found]
    assert times == sorted(times) and times[0] > 1_700_000_000_000
    return [pb.GroupMomentKind.Name(moment.kind).removeprefix("GROUP_MOMENT_KIND_") for moment in found]


async def test_a_whole_life_is_told_while_it_lasts_and_after(world):
    await world.create(groups_per_step=1)
    await world.submit("a", traceparent=TRACEPARENT)
    assert await kinds(world, "a") == ["SUBMITTED"]
    assert (await look(world, "a")).traceparent == TRACEPARENT
    (first,) = await world.lease()
    await world.release(first.lease_id, failure="the reward service\nhas\u2028crashed")
    (second,) = await world.lease()
    assert await world.put(group(second)) == ["ACCEPTED"]
    await world.open()
    await world.batch(0)
    so_far = ["SUBMITTED", "LEASED", "RETURNED", "LEASED", "PUT", "IN_BATCH"]
    assert await kinds(world, "a") == so_far
    await world.trained(0)
    await world.commit(1)
    assert await kinds(world, "a") == [*so_far, "COMMITTED"]

    told = await look(world, "a")
    assert (told.state, told.attempt, told.step) == (pb.GROUP_STATE_COMMITTED, 2, 0)
    _, leased, returned, _, put, batch, committed = told.moments
    assert leased.who == put.who == "r1"
    assert returned.reason == "the reward service has\u2028crashed"
    assert put.policy_version == 0 and batch.step == committed.step == 0


async def test_the_dead_the_dropped_and_the_delivered_are_told_as_well(world):
    await world.create(groups_per_step=2)
    await world.submit("dropped", "other", "dead")
    await world.submit("served", purpose=SERVE)
    assert await world.generate() == ["served", "dropped", "other"]
    assert await kinds(world, "served") == ["SUBMITTED", "LEASED", "PUT", "DELIVERED"]
    await world.open()
    await world.batch(0)
    await world.drop(0, "dropped")
    assert await kinds(world, "dropped") == ["SUBMITTED", "LEASED", "PUT", "IN_BATCH", "DROPPED"]
    (lease,) = await world.lease()
    await world.release(lease.lease_id, failure="too long", permanent=True)
    told = (await look(world, "dead")).moments[-1]
    assert (told.kind, told.reason) == (pb.GROUP_MOMENT_KIND_DEAD, "too long")
    await world.requeue_dead()
    assert await kinds(world, "dead") == ["SUBMITTED", "LEASED", "DEAD", "REQUEUED"]


async def test_a_long_life_keeps_its_beginning_and_its_end(world):
    await world.create(max_deliveries=1000, groups_per_step=1)
    await world.submit("a")
    for n in range(40):
        (lease,) = await world.lease()
        await world.release(lease.lease_id, failure=f"failure {n} " + "x" * 300)
    told = await look(world, "a")
    assert told.moments[0].kind == pb.GROUP_MOMENT_KIND_SUBMITTED
    assert told.moments[-1].reason.startswith("failure 39 ")
    life = await world.redis.hget(f"q:{{{world.run_id}}}:i:a", "life")
    assert len(life) <= 2000 and len(told.moments) < 20


async def test_lives_are_kept_of_the_most_recent_only(world):
    await world.create(groups_per_step=1)
    await world.redis.hset(f"q:{{{world.run_id}}}:run", "remembered_lives", 2)
    for name in ("a", "b", "c"):
        await world.submit(name, purpose=SERVE)
        await world.generate()
    assert [len((await look(world, name)).moments) for name in ("a", "b", "c")] == [0, 4, 4]
    assert await world.redis.hlen(f"q:{{{world.run_id}}}:lives") == 2
