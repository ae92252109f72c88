"""Members: their life, the group epoch, who is told."""

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


async def test_a_trainer_is_no_rollout_of_the_group_and_who_beats_hears_that_the_run_ended(world):
    await world.create()
    assert (await world.register("t1", kind=TRAINER)).group_epoch == 1
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


async def test_watchers_and_events_tell_of_each_change_but_not_of_gauges(world):
    await world.create(members=())
    watch = world.call("WatchMembers")
    assert not (await watch.read()).members
    joining = {"state": pb.MEMBER_STATE_JOINING, "policy_version": -1}
    await world.register("r1", **joining)
    assert [member.policy_version for member in (await watch.read()).members] == [-1]
    await beat(world, "r1", **joining, gauges={"x": 1})
    await beat(world, "r1", policy_version=4)
    assert [member.policy_version for member in (await watch.read()).members] == [4], "next, as gauges are no change"
    watch.cancel()
    await world.leave("r1")
    await world.finish()
    events = [r.event async for r in world.call("WatchRun")]
    members = [(e.member.member.state, e.member.gone, e.member.reason) for e in events if e.HasField("member")]
    assert members == [
        (pb.MEMBER_STATE_JOINING, False, ""),
        (pb.MEMBER_STATE_ACTIVE, False, ""),
        (pb.MEMBER_STATE_JOINING, True, "it left"),
    ]
