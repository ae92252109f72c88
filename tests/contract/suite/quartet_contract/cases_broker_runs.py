"""BrokerService: runs and their members."""

import time

import grpc
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import common_pb2

from quartet_contract.cases import Bad, Case, Good, NoBadInput, has
from quartet_contract.world import rollout

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
STATE, EXISTS = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS


def spec(w, **fields) -> pb.CreateRunRequest:
    return pb.CreateRunRequest(spec=pb.RunSpec(**{"run_id": w.name} | fields))


def has_stated_defaults(w, answer):
    run = answer.run
    assert answer.created and run.state == pb.RUN_STATE_ACTIVE and run.spec.run_id == w.name
    assert (run.spec.group_size, run.spec.groups_per_step, run.spec.max_staleness) == (8, 16, 4)
    assert (run.spec.max_deliveries, run.spec.max_queued_prompts, run.spec.max_experience_bytes) == (5, 4096, 1 << 30)
    ttls = run.spec.prompt_lease_ttl, run.spec.member_ttl, run.spec.result_ttl
    assert [ttl.seconds for ttl in ttls] == [60, 15, 3600]
    assert run.spec.lease_order == pb.LEASE_ORDER_FIFO and run.spec.partial_batch == pb.PARTIAL_BATCH_POLICY_DROP
    assert run.spec.evaluation_sampling.n == 1 and run.spec.sampling.n in (0, 8)
    assert abs(run.created_at.seconds - time.time()) < 60
    assert run.stats == pb.RunStats()


def was_there(w, answer):
    assert not answer.created and answer.run.spec.run_id == w.name


def finished(w, state, max_steps=5):
    name = w.run(max_steps=3).id
    end = pb.FinishRunRequest(run_id=name, state=pb.RunState.Value(f"RUN_STATE_{state}"))
    w.call("BrokerService.FinishRun", end)
    asked = spec(w, run_id=name, max_steps=max_steps, groups_per_step=2, max_staleness=0, group_size=2)
    asked.extend = True
    return asked


def goes_on(w, answer):
    run = answer.run
    assert not answer.created and (run.state, run.reason, run.spec.max_steps) == (pb.RUN_STATE_ACTIVE, "", 5)


def shows_run_and_members(w, answer):
    assert answer.run.stats.queued == answer.run.stats.submitted == 2
    assert [member.instance_id for member in answer.members] == ["r1"]


def two_runs(w):
    for name in (w.name, f"{w.name}-newer"):
        w.call("BrokerService.CreateRun", pb.CreateRunRequest(spec=pb.RunSpec(run_id=name)))
    return pb.ListRunsRequest()


def newest_first(w, answer):
    assert [run.spec.run_id for run in answer.runs[:2]] == [f"{w.name}-newer", w.name]
    made = [(run.created_at.seconds, run.created_at.nanos) for run in answer.runs]
    assert made == sorted(made, reverse=True)


def has_succeeded(w, answer):
    assert answer.run.state == pb.RUN_STATE_SUCCEEDED and answer.run.reason == "enough"


def is_gone(w, answer):
    assert answer.deleted
    try:
        w.call("BrokerService.GetRun", pb.GetRunRequest(run_id=w.name))
    except grpc.RpcError as error:
        assert error.code() == MISSING
    else:
        raise AssertionError("a deleted run is still there")


RUNS: dict[str, list[Case]] = {
    "BrokerService.CreateRun": [
        Good("defaults are filled in", lambda w: spec(w), has_stated_defaults, second=was_there),
        Bad("a name with a space", lambda w: spec(w, run_id="a run"), INVALID, "spec.run_id"),
        Bad("negative staleness", lambda w: spec(w, max_staleness=-1), INVALID, "spec.max_staleness"),
        Bad(
            "it stands with another specification",
            lambda w: spec(w, run_id=w.run(group_size=4).id, groups_per_step=2, max_staleness=0, group_size=3),
            EXISTS,
            "group_size",
        ),
        Good("a run that succeeded goes on", lambda w: finished(w, "SUCCEEDED"), goes_on),
        Bad("extending a failed run", lambda w: finished(w, "FAILED"), STATE, "only a run that"),
    ],
    "BrokerService.GetRun": [
        Good(
            "with statistics and members",
            lambda w: pb.GetRunRequest(run_id=w.run().submit("a", "b").id),
            shows_run_and_members,
        ),
        Bad("no such run", lambda w: pb.GetRunRequest(run_id=w.name), MISSING, "case-"),
    ],
    "BrokerService.ListRuns": [
        Good("newest first", two_runs, newest_first, volatile=("stats", "policy_version", "committed_step")),
        NoBadInput("the request has no field; where there is no run, the list is empty"),
    ],
    "BrokerService.FinishRun": [
        Good(
            "as planned",
            lambda w: pb.FinishRunRequest(run_id=w.run().id, state=pb.RUN_STATE_SUCCEEDED, reason="enough"),
            has_succeeded,
        ),
        Good(
            "the first outcome stands",
            lambda w: pb.FinishRunRequest(run_id=w.run().finish().id, state=pb.RUN_STATE_FAILED, reason="other"),
            has_succeeded,
        ),
        Bad(
            "no such run", lambda w: pb.FinishRunRequest(run_id=w.name, state=pb.RUN_STATE_CANCELLED), MISSING, "case-"
        ),
    ],
    "BrokerService.DeleteRun": [
        Good(
            "a finished run",
            lambda w: pb.DeleteRunRequest(run_id=w.run().ready("a").finish().id),
            is_gone,
            second=has(deleted=False),
        ),
        Good(
            "an active run by force",
            lambda w: pb.DeleteRunRequest(run_id=w.run().submit("a").id, force=True),
            is_gone,
            second=has(deleted=False),
        ),
        Bad("an active run", lambda w: pb.DeleteRunRequest(run_id=w.run().id), STATE, "force"),
    ],
}


# Members --------------------------------------------------------------------------------------------------------------


def joined(w, answer):
    assert answer.group_epoch >= 2  # "r1" came before
    assert answer.run.spec.run_id == w.name


def beat(w, answer):
    assert answer.group_epoch >= 1 and answer.policy_version == 0 and answer.run_state == pb.RUN_STATE_ACTIVE
    (member,) = w.call("BrokerService.GetRun", pb.GetRunRequest(run_id=w.name)).members
    assert (member.policy_version, member.waiting_for, member.address) == (3, "tea", "127.0.0.1:1")
    assert dict(member.gauges) == {"tokens_per_second": 12.5}


def left(w, answer):
    assert answer.group_epoch >= 2
    assert not w.call("BrokerService.GetRun", pb.GetRunRequest(run_id=w.name)).members


def members_by_id(w):
    run = w.run()
    for name in ("r0", "r2"):
        run.call("RegisterMember", pb.RegisterMemberRequest(run_id=run.id, member=rollout(name)))
    return pb.WatchMembersRequest(run_id=run.id)


def all_three(w, answers):
    assert answers[0].group_epoch >= 3
    assert [member.instance_id for member in answers[0].members] == ["r0", "r1", "r2"]


def register(w, run_id="", **fields):
    return pb.RegisterMemberRequest(run_id=run_id or w.run().id, member=rollout("r2", **fields))


MEMBERS: dict[str, list[Case]] = {
    "BrokerService.RegisterMember": [
        Good("a second rollout", register, joined),
        Bad(
            "a client is no member", lambda w: register(w, kind=common_pb2.SERVICE_KIND_CLIENT), INVALID, "member.kind"
        ),
        Bad("an address of two lines", lambda w: register(w, address="host:1\nforged line"), INVALID, "member.address"),
    ],
    "BrokerService.Heartbeat": [
        Good(
            "with news",
            lambda w: pb.HeartbeatRequest(
                run_id=w.run().id,
                member=rollout(address="", policy_version=3, waiting_for="tea", gauges={"tokens_per_second": 12.5}),
            ),
            beat,
        ),
        Bad("of no member at all", lambda w: pb.HeartbeatRequest(run_id=w.run().id), INVALID, "member.instance_id"),
    ],
    "BrokerService.LeaveMember": [
        Good("the only rollout", lambda w: pb.LeaveMemberRequest(run_id=w.run().id, instance_id="r1"), left),
        Bad("no such run", lambda w: pb.LeaveMemberRequest(run_id=w.name, instance_id="r1"), MISSING, "case-"),
    ],
    "BrokerService.WatchMembers": [
        Good("who is there now", members_by_id, all_three, take=1),
        Bad("no such run", lambda w: pb.WatchMembersRequest(run_id=w.name), MISSING, "case-"),
    ],
}

CASES = RUNS | MEMBERS
