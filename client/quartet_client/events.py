"""Events of a run, as `watch` yields them: one dataclass for each kind of the contract's RunEvent."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from quartet.v1 import broker_pb2

from quartet_client.from_proto import FromProto, to_datetime
from quartet_client.models import Group, Member
from quartet_common.durations import to_seconds


@dataclass(frozen=True, slots=True)
class RunStateChanged(FromProto):
    """The run was created or extended ("active"), or ended ("succeeded", "failed", "cancelled")."""

    state: str
    reason: str


def state_words(state: str) -> str:
    """Return what a run of this state does or did: "is active", "succeeded", "was cancelled"."""
    return {"succeeded": "succeeded", "failed": "failed", "cancelled": "was cancelled"}.get(state, f"is {state}")


@dataclass(frozen=True, slots=True)
class StepFinished(FromProto):
    """An optimizer step has finished; `policy_version` is that of the new weights."""

    step: int
    policy_version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationFinished(FromProto):
    """An evaluation has finished."""

    evaluation_set: str
    policy_version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WeightsPublished(FromProto):
    """Rollouts installed new weights: `seconds` from pause to resume, `bytes` sent to each."""

    policy_version: int
    group_epoch: int
    rollouts: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved(FromProto):
    """A checkpoint of the first `step` steps is durable at `path` on the trainer's host."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class MemberChanged(FromProto):
    """A member joined, changed its state, or left."""

    member: Member
    gone: bool
    reason: str


@dataclass(frozen=True, slots=True)
class GroupSample:
    """A finished group, as a sample for people to read."""

    group: Group


@dataclass(frozen=True, slots=True)
class Notice(FromProto):
    """A message for people; `level` is "info", "warning" or "error"."""

    level: str
    text: str
    source: str


What = (
    RunStateChanged
    | StepFinished
    | EvaluationFinished
    | WeightsPublished
    | CheckpointSaved
    | MemberChanged
    | GroupSample
    | Notice
)


@dataclass(frozen=True, slots=True)
class RunEvent:
    """An event with its position in the run's stream and its time by the broker's clock.

    `what` is None for a kind of event that this client does not support: a newer broker sent it.
    """

    event_id: str
    at: datetime
    what: What | None

    @classmethod
    def from_proto(cls, run_id: str, event: broker_pb2.RunEvent) -> "RunEvent":
        what: What | None = None
        match event.WhichOneof("event"):
            case "run_state":
                what = RunStateChanged.from_proto(event.run_state)
            case "step":
                what = StepFinished.from_proto(event.step)
            case "evaluation":
                what = EvaluationFinished.from_proto(event.evaluation)
            case "weights":
                what = WeightsPublished.from_proto(event.weights, seconds=to_seconds(event.weights.elapsed))
            case "checkpoint":
                what = CheckpointSaved.from_proto(event.checkpoint)
            case "member":
                what = MemberChanged.from_proto(event.member)
            case "sample":
                what = GroupSample(Group.from_transcript(run_id, event.sample.transcript))
            case "notice":
                what = Notice.from_proto(event.notice)
        return cls(event_id=event.event_id, at=to_datetime(event.at), what=what)
