"""BrokerService: prompts on their way to a rollout, and back."""

import time

import grpc
from quartet.v1 import broker_pb2 as pb

from quartet_contract.cases import Bad, Case, Good, Refused, has
from quartet_contract.world import instance

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
STATE, EXISTS = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


def submission(w, *instances, run=None, **fields):
    return pb.SubmitPromptsRequest(run_id=(run or w.run()).id, instances=instances, **fields)


def two_known(w, answer):
    assert (answer.accepted, answer.duplicates) == (0, 2)
    assert w.call("BrokerService.GetRun", pb.GetRunRequest(run_id=w.name)).run.stats.submitted == 2


def have_ended(w, answer):
    assert w.call("BrokerService.GetRun", pb.GetRunRequest(run_id=w.name)).run.prompts_ended


def two_leases(w, answer):
    assert [lease.instance for lease in answer.leases] == [instance("a"), instance("b")]
    assert all(lease.attempt == 1 and lease.expires_at.seconds > time.time() for lease in answer.leases)
    assert len({lease.lease_id for lease in answer.leases}) == 2
    assert answer.gate in (pb.GATE_REASON_NO_PROMPTS, pb.GATE_REASON_STALENESS) and answer.policy_version == 0


def gate_is_shut(w, answer):
    # One batch of two may run at max_staleness 0: the third prompt has to wait for the trainer.
    assert len(answer.leases) == 2 and answer.gate == pb.GATE_REASON_STALENESS


def all_renewed(w, answer):
    assert not answer.lost and answer.expires_at.seconds > time.time()


def lost_before(w, answer):
    assert (answer.requeued, answer.dead, list(answer.lost)) == (0, 0, [w.kept.lease])


def renewal(w, *others):
    leases = w.run().submit("a", "b").lease()
    return pb.RenewLeasesRequest(run_id=w.name, lease_ids=[*(lease.lease_id for lease in leases), *others])


def release(w, **fields):
    (lease,) = w.run().submit("a").lease()
    w.kept.lease = lease.lease_id
    return pb.ReleaseLeasesRequest(run_id=w.name, releases=[pb.LeaseRelease(lease_id=lease.lease_id, **fields)])


CASES: dict[str, list[Case]] = {
    "BrokerService.SubmitPrompts": [
        Good(
            "two prompts",
            lambda w: submission(w, instance("a"), instance("b")),
            has(accepted=2, duplicates=0),
            second=two_known,
        ),
        Bad("none", lambda w: submission(w), INVALID, "instances"),
        Bad("without an id", lambda w: submission(w, instance("a"), instance("")), INVALID, "instances[1].instance_id"),
        Bad(
            "for training, pinned to a version",
            lambda w: submission(w, instance("a", pinned_version=3)),
            INVALID,
            "instances[0].pinned_version",
        ),
        Bad(
            "an id that has another content",
            lambda w: submission(w, instance("a", text="2+2=?"), run=w.run().submit("a")),
            EXISTS,
            "'a'",
        ),
        Bad(
            "more than the queue holds",
            lambda w: submission(w, instance("b"), instance("c"), run=w.run(max_queued_prompts=2).submit("a")),
            FULL,
            "max_queued_prompts",
        ),
        Bad("after EndPrompts", lambda w: submission(w, instance("a"), run=w.run().end()), STATE, "ended"),
    ],
    "BrokerService.EndPrompts": [
        Good("of a run", lambda w: pb.EndPromptsRequest(run_id=w.run().id), have_ended),
        Bad("no such run", lambda w: pb.EndPromptsRequest(run_id=w.name), MISSING, "case-"),
    ],
    "BrokerService.LeasePrompts": [
        Good(
            "all that wait",
            lambda w: pb.LeasePromptsRequest(run_id=w.run().submit("a", "b").id, holder="r1", max_prompts=5),
            two_leases,
        ),
        Good(
            "no more than the gate allows",
            lambda w: pb.LeasePromptsRequest(run_id=w.run().submit("a", "b", "c").id, holder="r1", max_prompts=5),
            gate_is_shut,
        ),
        Bad("none wanted", lambda w: pb.LeasePromptsRequest(run_id=w.run().id, holder="r1"), INVALID, "max_prompts"),
        Bad("waiting 31 s", lambda w: w.run().wait(31), INVALID, "wait"),
        Bad("for a stranger", lambda w: w.run().wait(0, "stranger"), STATE, "stranger"),
    ],
    "BrokerService.RenewLeases": [
        Good("two", renewal, all_renewed, volatile=("expires_at",)),
        Refused("one that was never granted", lambda w: renewal(w, "never-granted"), has(lost=["never-granted"])),
        Bad("no such run", lambda w: pb.RenewLeasesRequest(run_id=w.name), MISSING, "case-"),
    ],
    "BrokerService.ReleaseLeases": [
        Good("on drain", release, has(requeued=1, dead=0, lost=[]), second=lost_before),
        Good(
            "for good",
            lambda w: release(w, failure="too long", permanent=True),
            has(requeued=0, dead=1, lost=[]),
            second=lost_before,
        ),
        Bad("no such run", lambda w: pb.ReleaseLeasesRequest(run_id=w.name), MISSING, "case-"),
    ],
}
