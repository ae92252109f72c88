"""TrainerService: of a trainer that has trained one step and waits, and of an idle one whose run does not exist."""

import time
from functools import partial
from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import trainer_pb2 as pb

from quartet_common.durations import to_seconds
from quartet_contract.cases import Bad, Case, Good, NoBadInput, has

INVALID, STATE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


def one_step_done(w, answer):
    assert answer.step == 1 and answer.run_id and answer.algorithm and answer.plugin and answer.world_size == 1
    assert answer.phase == pb.TRAINER_PHASE_WAITING_FOR_BATCH
    assert answer.session_epoch >= 0 and answer.group_epoch == -1  # there is no rollout
    assert answer.phase_seconds["training"] > 0
    # Names of phases, also of such as came after this was written.
    assert all(name.isidentifier() and name.islower() for name in answer.phase_seconds)


def metrics_of_step_0(w, answers):
    (report,) = answers
    assert report.step == 0 and abs(report.at.seconds - time.time()) < 600
    assert report.metrics["reward/mean"] == 0.5 and len(report.metrics) > 5


def is_on_disk(w, answer):
    checkpoint = answer.checkpoint
    assert checkpoint.step == 1 and Path(checkpoint.path).is_dir()
    assert abs(checkpoint.saved_at.seconds - time.time()) < 600 and to_seconds(checkpoint.elapsed) >= 0
    assert list(Path(checkpoint.path).rglob("*.safetensors")) and list(Path(checkpoint.path).rglob("config.json"))


def saved(w):
    w.call("TrainerService.SaveCheckpoint", pb.SaveCheckpointRequest())
    return pb.ListCheckpointsRequest()


def oldest_first(w, answer):
    steps = [checkpoint.step for checkpoint in answer.checkpoints]
    assert steps == sorted(steps) and steps[-1] == 1


def pause(w, seconds):
    return pb.PauseRequest(limit=Duration(seconds=seconds))


def paused(w):
    w.call("TrainerService.Pause", pb.PauseRequest())
    return pb.ResumeRequest()


CASES: dict[str, list[Case]] = {
    "TrainerService.GetStatus": [
        Good("after a step", lambda w: pb.TrainerServiceGetStatusRequest(), one_step_done, volatile=("phase_seconds",)),
        NoBadInput("the request has no field, and there is a status in every state"),
    ],
    "TrainerService.WatchMetrics": [
        Good("all there are", lambda w: pb.WatchMetricsRequest(after_step=-1), metrics_of_step_0, take=1),
        Bad("after step -2", lambda w: pb.WatchMetricsRequest(after_step=-2), INVALID, "after_step"),
    ],
    "TrainerService.SaveCheckpoint": [
        Good("of the step done", lambda w: pb.SaveCheckpointRequest(), is_on_disk, volatile=("elapsed", "saved_at")),
        Bad("before the first batch", lambda w: pb.SaveCheckpointRequest(), STATE, "batch", server="idle trainer"),
    ],
    "TrainerService.ListCheckpoints": [
        Good("after one was saved", saved, oldest_first, volatile=("elapsed", "saved_at")),
        NoBadInput("the request has no field; where there is none, the list is empty"),
    ],
    "TrainerService.Pause": [
        Good("between steps", lambda w: pb.PauseRequest(reason="a look at it"), has(step=1)),
        *(
            Bad(what, partial(pause, seconds=seconds), INVALID, "limit")
            for what, seconds in (("for less than no time", -1), ("for thirty years", 10**9))
        ),
    ],
    "TrainerService.Resume": [
        Good("after a pause", paused, has(step=1)),
        NoBadInput("the request has no field; where there is no pause it changes nothing"),
    ],
    "TrainerService.Stop": [
        Good(
            "ends it with a checkpoint",
            lambda w: pb.StopRequest(reason="the tests are over"),
            has(step=1),
            once="the first call ends the service",
            last=True,
        ),
        NoBadInput("its one field is a reason for the log: any text will do; it works in every state"),
    ],
}
