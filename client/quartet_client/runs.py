"""Runs, members, evaluations and services as they stand: frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from quartet.v1 import broker_pb2, common_pb2

from quartet_client.models import Group, enum_name, to_datetime
from quartet_common.proportions import proportion


@dataclass(frozen=True, slots=True)
class RunStats:
    """Counts of a run's groups; the meaning of each is RunStats' in broker.proto."""

    queued: int = 0
    leased: int = 0
    ready: int = 0
    leased_to_trainer: int = 0
    trained: int = 0
    committed: int = 0
    dropped: int = 0
    stale: int = 0
    dead: int = 0
    redelivered: int = 0
    duplicates: int = 0
    experience_bytes: int = 0
    untrained_in_flight: int = 0
    submitted: int = 0
    dead_training: int = 0

    @classmethod
    def from_proto(cls, stats: broker_pb2.RunStats) -> "RunStats":
        """Return the contract's RunStats."""
        return cls(**{name: getattr(stats, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Member:
    """A live rollout or trainer of a run.

    Attributes:
        kind: "rollout" or "trainer".
        state: "joining", "active" or "draining".
        policy_version: of its weights; -1 if unknown.
    """

    instance_id: str
    kind: str
    address: str
    state: str
    policy_version: int
    gauges: Mapping[str, float] = field(default_factory=dict)
    waiting_for: str = ""

    @classmethod
    def from_proto(cls, member: broker_pb2.Member) -> "Member":
        """Return the contract's Member."""
        return cls(
            instance_id=member.instance_id,
            kind=enum_name(common_pb2.ServiceKind, member.kind),
            address=member.address,
            state=enum_name(broker_pb2.MemberState, member.state),
            policy_version=member.policy_version,
            gauges=dict(member.gauges),
            waiting_for=member.waiting_for,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it stands.

    Attributes:
        state: "active", "succeeded", "failed" or "cancelled".
        spec: its whole specification, defaults filled in (the contract's RunSpec).
        committed_step: every step below it is in a durable checkpoint.
        ending: what ended it: "max_steps", "data", "early_stop", "requested", "dead_prompts" or "invalid_groups";
            "unspecified" while it is active, or where broker or trainer do not say.
        newest_data_pass: of which training prompts were submitted; 0 also before the first.
        members: live members; filled by `run`, not by `runs`.
    """

    run_id: str
    state: str
    reason: str
    created_at: datetime
    policy_version: int
    committed_step: int
    prompts_ended: bool
    stats: RunStats
    spec: broker_pb2.RunSpec
    members: tuple[Member, ...] = ()
    ending: str = "unspecified"
    newest_data_pass: int = 0

    @property
    def active(self) -> bool:
        """True until the run has ended."""
        return self.state == "active"

    @classmethod
    def from_proto(cls, run: broker_pb2.Run, members=()) -> "Run":
        """Return the contract's Run with its members."""
        return cls(
            run_id=run.spec.run_id,
            state=enum_name(broker_pb2.RunState, run.state),
            reason=run.reason,
            created_at=to_datetime(run.created_at),
            policy_version=run.policy_version,
            committed_step=run.committed_step,
            prompts_ended=run.prompts_ended,
            stats=RunStats.from_proto(run.stats),
            spec=run.spec,
            members=tuple(Member.from_proto(member) for member in members),
            ending=enum_name(broker_pb2.RunEnding, run.ending),
            newest_data_pass=run.newest_data_pass,
        )


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where a prompt instance is in its life; `step` is -1 if none, `state` as GroupState in broker.proto."""

    state: str
    attempt: int
    holder: str
    step: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of a stored prompt set.

    Attributes:
        policy_version: the newest version among the tokens; `oldest_version` is the oldest. They differ if weights were
            updated while it was drawn.
        prompts, finished, dead: counts.
        reward: mean over prompts of the mean reward; None if prompts were lost: those left are not the set.
        accuracy: mean answer accuracy over the judged completions; None likewise, and where none was judged.
        interval: the ends of its 95% interval (`quartet_common.proportions`); None where `accuracy` is.
        judged: completions whose answers a verifier judged.
        groups: the finished groups; empty if only the summary was asked for.
    """

    evaluation_id: str
    evaluation_set: str
    policy_version: int
    oldest_version: int
    complete: bool
    prompts: int
    finished: int
    dead: int
    reward: float | None
    accuracy: float | None
    interval: tuple[float, float] | None
    judged: int
    groups: tuple[Group, ...] = ()

    @classmethod
    def from_proto(
        cls, run_id: str, evaluation_id: str, version: int, response: broker_pb2.GetEvaluationResponse
    ) -> "Evaluation":
        """Return the contract's GetEvaluationResponse."""
        headers = response.headers
        whole = bool(headers) and len(headers) == response.prompts
        judged = [(header.completions - header.unjudged, header.ans_acc) for header in headers]
        accuracy = proportion(judged) if whole else None
        return cls(
            evaluation_id=evaluation_id,
            evaluation_set=evaluation_id.rpartition("@")[0],
            policy_version=max((header.max_policy_version for header in headers), default=version),
            oldest_version=min((header.min_policy_version for header in headers), default=version),
            complete=response.complete,
            prompts=response.prompts,
            finished=response.finished,
            dead=response.dead,
            reward=sum(header.reward_mean for header in headers) / len(headers) if whole else None,
            accuracy=accuracy.value if accuracy else None,
            interval=(accuracy.low, accuracy.high) if accuracy else None,
            judged=sum(count for count, _ in judged),
            groups=tuple(Group.from_transcript(run_id, transcript) for transcript in response.transcripts),
        )


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One service as it answers now.

    Attributes:
        kind: "broker", "reward", "rollout" or "trainer".
        health: "serving", "not_serving" or "unreachable".
        waiting_for: what it waits for before it can work, in words.
        details: the service's own status by field name: counts, versions, phase.
        error: why it cannot be reached, in a sentence; empty if it can.
        idle_fraction: share of the last minute without work; None where the service does not tell (rollout, trainer).
    """

    kind: str
    address: str
    health: str
    instance_id: str = ""
    build: str = ""
    started_at: datetime | None = None
    waiting_for: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    idle_fraction: float | None = None
