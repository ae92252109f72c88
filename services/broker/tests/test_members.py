"""Members: their life, the group epoch, who is told."""

import asyncio

import grpc
from conftest import on_both
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import common_pb2
from world import refused

from quartet_common.durations import to_duration

pytestmark = on_both

TRAINER = common_pb2.SERVICE_KIND_TRAINER


async def beat(world, name: str, **fields):
    fields = {"state": pb.MEMBER_STATE_ACTIVE} | fields
    return await world.call("Heartbeat", member=pb.Member(instance_id=name, **fields))


async def test_the_group_epoch_grows_with_the_set_of_rollouts_only(world):
    await world.create(members=())
    assert (await world.register("r1")).group_epoch == 1
    assert (await world.register("r1")).group_epoch == 1, "again"
    assert (await world.register("t1", kind=TRAINER)).group_epoch == 1
    assert (await world.register("r2")).group_epoch == 2
    assert (await world.register("r2", address="127.0.0.1:2")).group_epoch == 3, "it moved"
    assert [await world.leave("r2"), await world.leave("r2")] == [4, 4]


async def test_a_heartbeat_says_what_changed_and_is_what_others_see(world):
    await world.create(members=())
    await world.register("r1", state=pb.MEMBER_STATE_JOINING, capabilities=["weights.gloo"], policy_version=-1)
    answer = await beat(world, "r1", policy_version=3, gauges={"tokens_per_second": 5000}, waiting_for="weights")
    assert (answer.group_epoch, answer.run_state, answer.policy_version) == (1, pb.RUN_STATE_ACTIVE, 0)
    (member,) = (await world.call("GetRun")).members
    assert (member.state, member.policy_version, member.waiting_for) == (pb.MEMBER_STATE_ACTIVE, 3, "weights")
    assert member.capabilities == ["weights.gloo"] and member.gauges["tokens_per_second"] == 5000
    await world.finish()
    assert (await beat(world, "r1")).run_state == pb.RUN_STATE_SUCCEEDED


async def test_a_member_that_misses_its_ttl_is_gone(world):
    await world.create(member_ttl=to_duration(0.3))
    watch = world.call("WatchMembers")
    first = await watch.read()
    assert [member.instance_id for member in first.members] == ["r1"]
    second = await watch.read()
    assert not second.members and second.group_epoch == first.group_epoch + 1
    watch.cancel()
    await refused(beat(world, "r1"), grpc.StatusCode.NOT_FOUND, "register again")


async def test_watchers_are_told_of_each_change_but_not_of_gauges(world):
    await world.create(members=())
    watch = world.call("WatchMembers")
    assert not (await watch.read()).members
    await world.register("r1", state=pb.MEMBER_STATE_JOINING, policy_version=-1)
    assert [member.policy_version for member in (await watch.read()).members] == [-1]
    await beat(world, "r1", state=pb.MEMBER_STATE_JOINING, policy_version=-1, gauges={"x": 1})
    await beat(world, "r1", policy_version=4)
    assert [member.policy_version for member in (await watch.read()).members] == [4]
    pending = asyncio.ensure_future(watch.read())
    done, _ = await asyncio.wait([pending], timeout=0.3)
    assert not done
    watch.cancel()


async def test_comings_goings_and_states_are_events(world):
    await world.create(members=())
    await world.register("r1", state=pb.MEMBER_STATE_JOINING)
    await beat(world, "r1", policy_version=1)
    await beat(world, "r1", policy_version=2)
    await world.leave("r1")
    await world.finish()
    events = [r.event async for r in world.call("WatchRun")]
    members = [(e.member.member.state, e.member.gone, e.member.reason) for e in events if e.HasField("member")]
    assert members == [
        (pb.MEMBER_STATE_JOINING, False, ""),
        (pb.MEMBER_STATE_ACTIVE, False, ""),
        (pb.MEMBER_STATE_JOINING, True, "it left"),
    ]
