"""BrokerService: finished groups on their way into durable weights."""

import math

import grpc
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2

from quartet_contract.cases import Bad, Case, Good, Refused, has
from quartet_contract.world import put_group

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
STATE = grpc.StatusCode.FAILED_PRECONDITION


def put(w, change=lambda group: None):
    (lease,) = w.run().submit("a").lease()
    group = put_group(lease)
    change(group)
    return pb.PutExperienceRequest(run_id=w.name, groups=[group])


def header(**fields):
    return lambda group: group.group.header.MergeFrom(experience_pb2.GroupHeader(**fields))


def another_lease(group):
    group.lease_id = "another's"


def batch(w, run, **fields):
    w.kept.run = run
    return pb.LeaseExperienceRequest(run_id=run.id, session_epoch=run.session, **fields)


def whole_batch(w, answers):
    manifest = answers[0].manifest
    assert manifest.granted and list(manifest.instance_ids) == ["a", "b"] and not manifest.run_finished
    groups = [answer.group for answer in answers[1:]]
    assert [group.header.instance_id for group in groups] == ["a", "b"]
    assert all(group.tensors == b"opaque" and group.transcript for group in groups)


def granted_anew(w, answers):
    whole_batch(w, answers)
    assert not answers[0].manifest.replayed


def granted_again(w, answers):
    whole_batch(w, answers)
    assert answers[0].manifest.replayed


def too_few(w, answers):
    (answer,) = answers
    assert not answer.manifest.granted and (answer.manifest.ready, answer.manifest.needed) == (1, 2)


def fenced(run):
    """The run, and a newer session than the one it knows."""
    known = run.session
    run.open()
    run.session = known
    return run


def drop(w, run, **fields):
    return pb.DropExperienceRequest(run_id=run.id, session_epoch=run.session, reason="zero variance", **fields)


def one_dropped(w, answer):
    assert answer.dropped == 1
    assert w.call("BrokerService.GetRun", pb.GetRunRequest(run_id=w.name)).run.stats.dropped == 1


EXPERIENCE: dict[str, list[Case]] = {
    "BrokerService.PutExperience": [
        Good(
            "a leased prompt's group",
            put,
            has(outcomes=[pb.PUT_OUTCOME_ACCEPTED]),
            second=has(outcomes=[pb.PUT_OUTCOME_DUPLICATE]),
        ),
        Refused("under another's lease", lambda w: put(w, another_lease), has(outcomes=[pb.PUT_OUTCOME_LEASE_LOST])),
        Bad(
            "for another purpose than the prompt's",
            lambda w: put(w, header(purpose=experience_pb2.PURPOSE_SERVE)),
            INVALID,
            "groups[0].group.header.purpose",
        ),
        Bad(
            "newest version older than the oldest",
            lambda w: put(w, header(min_policy_version=2, max_policy_version=1)),
            INVALID,
            "policy_version",
        ),
        Bad("less than no completions", lambda w: put(w, header(completions=-1)), INVALID, "header.completions"),
        Bad("a mean reward of nan", lambda w: put(w, header(reward_mean=math.nan)), INVALID, "header.reward_mean"),
    ],
    "BrokerService.LeaseExperience": [
        Good("a whole batch", lambda w: batch(w, w.run().ready("a", "b").open()), granted_anew, second=granted_again),
        Good("all or nothing", lambda w: batch(w, w.run().ready("a").open()), too_few),
        Bad("in a fenced session", lambda w: batch(w, fenced(w.run().granted())), STATE, "fenced"),
        Bad("before the checkpoint is settled", lambda w: batch(w, behind(w.run()), step=2), STATE, "checkpoint"),
    ],
    "BrokerService.DropExperience": [
        Good(
            "one of two", lambda w: drop(w, w.run().granted(), instance_ids=["a"]), one_dropped, second=has(dropped=0)
        ),
        Bad("of step -1", lambda w: drop(w, w.run().granted(), step=-1), INVALID, "step"),
    ],
}


# The trainer's session ------------------------------------------------------------------------------------------------


def opened(w, answer):
    assert answer.session_epoch > w.kept.run.session
    assert answer.replayable_steps == 1 and answer.run.spec.run_id == w.name and answer.run.policy_version == 0


def session(w, run, **fields):
    w.kept.run = run
    return pb.OpenSessionRequest(**{"run_id": run.id, "holder": "t2"} | fields)


def behind(run):
    """A session with a checkpoint of 2 steps, at a broker that has none."""
    return run.submit("a", "b", "c", "d").open(checkpoint_step=2, settles_ledger=True)


def settle(run, first=0):
    names = [["a", "b"], ["c", "d"]]
    steps = [pb.TrainedStep(step=first + n, instance_ids=ids) for n, ids in enumerate(names)]
    return pb.SettleTrainedRequest(run_id=run.id, session_epoch=run.session, steps=steps)


def settled(groups):
    def check(w, answer):
        assert (answer.settled, answer.settled_steps) == (groups, 2)
        run = w.call("BrokerService.GetRun", pb.GetRunRequest(run_id=w.name)).run
        assert run.committed_step == 2 and (run.stats.committed, run.stats.queued) == (4, 0)

    return check


def mark(run, step=0):
    return pb.MarkTrainedRequest(run_id=run.id, session_epoch=run.session, step=step)


def commit(run, step=1):
    return pb.CommitRequest(run_id=run.id, session_epoch=run.session, step=step)


def is_version_1(w, answer):
    assert answer.policy_version == 1
    run = w.call("BrokerService.GetRun", pb.GetRunRequest(run_id=w.name)).run
    assert run.policy_version == 1 and run.stats.trained == 2


def committed(groups):
    def check(w, answer):
        assert answer.committed == groups
        run = w.call("BrokerService.GetRun", pb.GetRunRequest(run_id=w.name)).run
        assert run.committed_step == 1 and run.stats.committed == 2

    return check


SESSION: dict[str, list[Case]] = {
    "BrokerService.OpenSession": [
        Good("what was trained after the checkpoint is replayed", lambda w: session(w, w.run().trained()), opened),
        Bad(
            "from a checkpoint older than what is committed",
            lambda w: session(w, w.run().committed()),
            STATE,
            "committed",
        ),
        Bad("no such run", lambda w: pb.OpenSessionRequest(run_id=w.name, holder="t1"), MISSING, "case-"),
    ],
    "BrokerService.SettleTrained": [
        Good(
            "the steps of a checkpoint that the broker lacks",
            lambda w: settle(behind(w.run())),
            settled(4),
            second=settled(0),
        ),
        Bad("without the first", lambda w: settle(behind(w.run()), 1), STATE, "step 1"),
    ],
    "BrokerService.MarkTrained": [
        Bad(
            "with another batch than the step's",
            lambda w: pb.MarkTrainedRequest(
                run_id=(run := w.run().granted()).id, session_epoch=run.session, step=0, instance_ids=["a", "z"]
            ),
            STATE,
            "another batch",
        ),
        Good("step 0", lambda w: mark(w.run().granted()), is_version_1),
        Bad("in a fenced session", lambda w: mark(fenced(w.run().granted())), STATE, "fenced"),
    ],
    "BrokerService.Commit": [
        Good("one step", lambda w: commit(w.run().trained()), committed(2), second=committed(0)),
        Bad("in a fenced session", lambda w: commit(fenced(w.run().trained())), STATE, "fenced"),
        Bad("ahead of what is trained", lambda w: commit(w.run().granted()), STATE, "step"),
    ],
}

CASES = EXPERIENCE | SESSION
