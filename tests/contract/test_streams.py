"""Streams that stay open: they tell what is new when it is new, and a caller who goes away is let go."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import broker_pb2_grpc

from quartet_contract.calls import SECONDS
from quartet_contract.world import SERVE, World, rollout


@pytest.fixture
def callers(stack):
    """Return the servers that work together."""
    return stack.callers()


@pytest.fixture
def world(callers):
    """Return a world with a broker."""
    return World(callers)


@contextmanager
def open_stream(callers, rpc: str, request) -> Iterator[grpc.Call]:
    """Have a broker's stream open."""
    stub = broker_pb2_grpc.BrokerServiceStub(callers["BrokerService"].channel)
    stream = getattr(stub, rpc)(request, timeout=SECONDS)
    try:
        yield stream
    finally:
        stream.cancel()


def test_watch_members_tells_who_comes_and_who_goes(callers, world):
    run = world.run()
    with open_stream(callers, "WatchMembers", pb.WatchMembersRequest(run_id=run.id)) as stream:
        first = next(stream)
        run.call("RegisterMember", pb.RegisterMemberRequest(run_id=run.id, member=rollout("r2")))
        second = next(stream)
        run.call("LeaveMember", pb.LeaveMemberRequest(run_id=run.id, instance_id="r1"))
        third = next(stream)
    names = [[member.instance_id for member in each.members] for each in (first, second, third)]
    assert names == [["r1"], ["r1", "r2"], ["r2"]]
    assert first.group_epoch < second.group_epoch < third.group_epoch


def test_watch_run_goes_on_after_an_event_and_ends_with_the_run(callers, world):
    run = world.run()
    event = pb.RunEvent(notice=pb.Notice(level="info", text="tea", source="t1"))
    report = pb.ReportProgressRequest(run_id=run.id, event=event)
    last = run.call("ReportProgress", report).event_id
    with open_stream(callers, "WatchRun", pb.WatchRunRequest(run_id=run.id, after_event_id=last)) as stream:
        told = [run.call("ReportProgress", report).event_id]
        assert next(stream).event.event_id == told[0]
        told.append(run.call("ReportProgress", report).event_id)
        run.finish()
        *others, end = [answer.event for answer in stream]
    assert [each.event_id for each in others] == told[1:]
    assert end.run_state.state == pb.RUN_STATE_SUCCEEDED


def test_collect_results_answers_as_groups_are_finished(callers, world):
    run = world.run().submit("s1", "s2", purpose=SERVE)
    request = pb.CollectResultsRequest(run_id=run.id, instance_ids=["s1", "s2"])
    with open_stream(callers, "CollectResults", request) as stream:
        first, second = run.lease(2)
        run.put([second])
        assert next(stream).instance_id == second.instance.instance_id
        run.put([first])
        assert [answer.instance_id for answer in stream] == [first.instance.instance_id]
