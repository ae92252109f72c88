"""BrokerService: evaluations, results and events; what is set aside, and where a group is."""

import time

import grpc
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2

from quartet_contract.cases import Bad, Case, Good, has
from quartet_contract.world import EVALUATE, SERVE, instance

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


def is_complete(w, answer):
    assert answer.complete and (answer.prompts, answer.finished, answer.dead) == (1, 1, 0)
    (header,), (transcript,) = answer.headers, answer.transcripts
    assert header.purpose == EVALUATE and header.completions == 2
    assert experience_pb2.GroupTranscript.FromString(transcript).instance.pinned_version == 0


def stored_set(w):
    w.run().submit("e1", purpose=EVALUATE, evaluation_set="heldout")
    return pb.StartEvaluationRequest(run_id=w.name, evaluation_set="heldout", policy_version=0)


def served_and_dead(w):
    run = w.run().dead("d1").submit("s1", purpose=SERVE)
    run.put(run.lease(1))
    return pb.CollectResultsRequest(run_id=run.id, instance_ids=["s1", "d1"])


def each_once_in_order(w, answers):
    assert [answer.instance_id for answer in answers] == ["d1", "s1"]  # in order of completion
    assert answers[0].dead.reasons == ["prompt too long"] and answers[0].dead.attempts == 1
    transcript = experience_pb2.GroupTranscript.FromString(answers[1].transcript)
    assert transcript.instance.instance_id == "s1"


def told_events(w):
    run, event = w.run(), pb.RunEvent(step=pb.StepFinished(step=0, policy_version=1))
    run.call("ReportProgress", pb.ReportProgressRequest(run_id=run.id, event=event))
    return pb.WatchRunRequest(run_id=run.finish().id)


def from_start_to_end(w, answers):
    events = [answer.event for answer in answers]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == kinds[-1] == "run_state" and "step" in kinds and "member" in kinds
    assert events[-1].run_state.state == pb.RUN_STATE_SUCCEEDED and events[-1].run_state.reason == "enough"
    assert len({event.event_id for event in events}) == len(events)
    after = pb.WatchRunRequest(run_id=w.name, after_event_id=events[-2].event_id)
    (end,) = w.call("BrokerService.WatchRun", after)
    assert end.event == events[-1]


def report(w, event):
    return pb.ReportProgressRequest(run_id=w.run().id, event=event)


NOTICE = pb.RunEvent(notice=pb.Notice(level="info", text="tea is ready", source="r1"))


def is_in_the_stream(w, answer):
    found = w.call("BrokerService.WatchRun", pb.WatchRunRequest(run_id=w.name), take=3)
    told = {each.event.event_id: each.event for each in found}[answer.event_id]
    assert told.notice == NOTICE.notice and abs(told.at.seconds - time.time()) < 60


RESULTS: dict[str, list[Case]] = {
    "BrokerService.StartEvaluation": [
        Good("a stored set", stored_set, has(evaluation_id="heldout@0", prompts=1)),
        Bad(
            "a set without prompts",
            lambda w: pb.StartEvaluationRequest(run_id=w.run().id, evaluation_set="nothing"),
            MISSING,
            "nothing",
        ),
    ],
    "BrokerService.GetEvaluation": [
        Good(
            "complete",
            lambda w: pb.GetEvaluationRequest(run_id=w.run().evaluation(finished=True).id, evaluation_id="heldout@0"),
            is_complete,
        ),
        Bad(
            "never started",
            lambda w: pb.GetEvaluationRequest(run_id=w.run().id, evaluation_id="heldout@7"),
            MISSING,
            "heldout@7",
        ),
    ],
    "BrokerService.CollectResults": [
        Good("a result and a dead prompt", served_and_dead, each_once_in_order),
        Bad("of nothing", lambda w: pb.CollectResultsRequest(run_id=w.run().id), INVALID, "instance_ids"),
    ],
    "BrokerService.ReportProgress": [
        Good("a notice", lambda w: report(w, NOTICE), is_in_the_stream),
        Bad(
            "the run's end",
            lambda w: report(w, pb.RunEvent(run_state=pb.RunStateChanged(state=pb.RUN_STATE_FAILED))),
            INVALID,
            "event",
        ),
    ],
    "BrokerService.WatchRun": [
        Good("of a finished run", told_events, from_start_to_end),
        Bad("no such run", lambda w: pb.WatchRunRequest(run_id=w.name), MISSING, "case-"),
    ],
}


CLOCK = ("answered_at",)
"""What GetGroup tells anew each time."""


# What is set aside, and where a group is ------------------------------------------------------------------------------


def one_dead(w, answer):
    assert answer.total == 1 and answer.dead[0].instance == instance("d1")
    assert answer.dead[0].reasons == ["prompt too long"] and answer.dead[0].attempts == 1


def one_requeued(w, answer):
    assert answer.requeued == 1
    group = w.call("BrokerService.GetGroup", pb.GetGroupRequest(run_id=w.name, instance_id="d1"))
    assert group.state == pb.GROUP_STATE_QUEUED and group.attempt == 0


def leased_group(w):
    run = w.run().submit("a")
    run.lease(1)
    return pb.GetGroupRequest(run_id=run.id, instance_id="a")


def books_of_each_state(w):
    run = w.run().committed()
    run.submit("c", "d").lease(1, version=1)
    return pb.AuditRunRequest(run_id=run.id)


def right_books(w, answers):
    *pages, end = answers
    places = {record.instance_id: (record.state, record.step) for answer in pages for record in answer.page.instances}
    assert places == {
        "a": (pb.GROUP_STATE_COMMITTED, 0),
        "b": (pb.GROUP_STATE_COMMITTED, 0),
        "c": (pb.GROUP_STATE_LEASED, -1),
        "d": (pb.GROUP_STATE_QUEUED, -1),
    }
    summary = end.summary
    assert not summary.faults and summary.recounted == summary.run.stats
    assert (summary.run.stats.committed, summary.forgotten, summary.first_remembered_pass) == (2, 0, 0)


ASIDE: dict[str, list[Case]] = {
    "BrokerService.AuditRun": [
        # Twice, but in no order.
        Good("some of each", books_of_each_state, right_books, second=right_books),
        Bad("no such run", lambda w: pb.AuditRunRequest(run_id=w.name), MISSING, "case-"),
    ],
    "BrokerService.ListDead": [
        Good("one", lambda w: pb.ListDeadRequest(run_id=w.run().dead("d1").id), one_dead),
        Bad("no such run", lambda w: pb.ListDeadRequest(run_id=w.name), MISSING, "case-"),
    ],
    "BrokerService.RequeueDead": [
        Good(
            "all of them",
            lambda w: pb.RequeueDeadRequest(run_id=w.run().dead("d1").id),
            one_requeued,
            second=has(requeued=0),
        ),
        Bad("no such run", lambda w: pb.RequeueDeadRequest(run_id=w.name), MISSING, "case-"),
    ],
    "BrokerService.GetUnscored": [
        Good(
            "of a dead prompt",
            lambda w: pb.GetUnscoredRequest(run_id=w.run().dead("d1", b"opaque").id, instance_id="d1"),
            has(unscored=b"opaque"),
        ),
        Bad(
            "of a prompt that has none",
            lambda w: pb.GetUnscoredRequest(run_id=w.run().dead("d1").id, instance_id="d1"),
            MISSING,
            "d1",
        ),
    ],
    "BrokerService.GetGroup": [
        Good(
            "at a rollout",
            leased_group,
            has(state=pb.GROUP_STATE_LEASED, attempt=1, holder="r1", step=-1),
            volatile=CLOCK,
        ),
        Good(
            "committed",
            lambda w: pb.GetGroupRequest(run_id=w.run().committed().id, instance_id="a"),
            has(state=pb.GROUP_STATE_COMMITTED, step=0),
            volatile=CLOCK,
        ),
        Bad("never seen", lambda w: pb.GetGroupRequest(run_id=w.run().id, instance_id="nobody"), MISSING, "nobody"),
    ],
}

CASES = RESULTS | ASIDE
