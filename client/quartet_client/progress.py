"""The state of a run: its events and the status of its services, folded into one plain object.

Metric names are those of docs/metrics.md. The launcher, `quartet watch` and `quartet run` draw it with `view`.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeGuard

from quartet_client.events import (
    EvaluationFinished,
    GroupSample,
    MemberChanged,
    Notice,
    RunEvent,
    RunStateChanged,
    StepFinished,
)
from quartet_client.models import Evaluation, Group, Member, Run, RunStats, ServiceStatus


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def figure_of(metrics: Mapping[str, Any], evaluation_set: str, name: str) -> Any:
    """Return `eval/{set}/{name}`; None if it was not reported, or is no figure of the set because prompts were lost."""
    return None if incomplete(metrics, evaluation_set) else metrics.get(f"eval/{evaluation_set}/{name}")


def incomplete(metrics: Mapping[str, Any], evaluation_set: str) -> str:
    """Return "incomplete: 78 of 80" of an evaluation that lost prompts; else ""."""
    dead = metrics.get(f"eval/{evaluation_set}/dead")
    answered = metrics.get(f"eval/{evaluation_set}/prompts")
    if not isinstance(dead, int | float) or not isinstance(answered, int | float) or not dead:
        return ""
    return incomplete_of(answered, answered + dead)


def incomplete_of(answered: float, prompts: float) -> str:
    """Return the words for an evaluation of so many prompts, of which so many were answered."""
    return f"incomplete: {answered:.0f} of {prompts:.0f}"


REWARD = "reward/mean"
ACCURACY = "reward/ans_acc"
LENGTH = "completions/mean_length"
STALENESS = "staleness/mean"
IDLE = "time/idle_fraction"
TOKENS_PER_SECOND = "throughput/tokens_per_second"

_NOTICES_KEPT = 20


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """An evaluation of a set at a policy version.

    Attributes:
        accuracy: None if no answer was judged, or prompts were lost.
        incomplete: "incomplete: 78 of 80" if prompts were lost.
        interval: the ends of the accuracy's 95% interval; None if the trainer gives none.
        judged: completions whose answers were judged.
    """

    policy_version: int
    accuracy: float | None
    reward: float | None
    incomplete: str = ""
    interval: tuple[float, float] | None = None
    judged: int = 0

    @classmethod
    def of(cls, name: str, policy_version: int, metrics: Mapping[str, Any]) -> "EvaluationPoint":
        """Return what the metrics tell of the set `name`; values that are no finite numbers are left out."""
        told = (figure_of(metrics, name, key) for key in ("ans_acc", "reward", "ans_acc_low", "ans_acc_high", "judged"))
        accuracy, reward, low, high, judged = (float(value) if is_number(value) else None for value in told)
        interval = None if low is None or high is None else (low, high)
        return cls(policy_version, accuracy, reward, incomplete(metrics, name), interval, int(judged or 0))


def accuracy_text(of: EvaluationPoint | Evaluation, form: str = ".1%") -> str:
    """Return "81.2% (95%: 71.3% to 88.3%, n = 80)", n the judged completions; "–" if none was judged."""
    if of.accuracy is None:
        return "–"
    if of.interval is None:
        return f"{of.accuracy:{form}}"
    low, high = of.interval
    return f"{of.accuracy:{form}} (95%: {low:{form}} to {high:{form}}, n = {of.judged})"


@dataclass
class RunProgress:
    """A run as it stands; `fold` takes its events, `fold_run` its counts, `fold_service` a service's state.

    Attributes:
        state: "waiting" before the run's first event, then as Run.state.
        steps_done: optimizer steps done.
        max_steps: where the run ends; 0: when its prompts end.
        stepped: True from the first step on, and again after each resume.
        groups_per_step: of a whole batch.
        metrics: of the last step.
        rewards: each finished step and its mean reward. A step that is replayed undoes those that came after it.
        evaluations: by set, oldest first.
        members: live members by instance id.
        sample: the last finished group that was shown.
        services: by kind; empty until asked.
        notices: the last ones, oldest first.
    """

    run_id: str
    model: str = ""
    max_steps: int = 0
    state: str = "waiting"
    reason: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    last_event_id: str = ""
    policy_version: int = 0
    steps_done: int = 0
    stepped: bool = False
    groups_per_step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewards: list[tuple[int, float | None]] = field(default_factory=list)
    evaluations: dict[str, list[EvaluationPoint]] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    sample: Group | None = None
    notices: deque[Notice] = field(default_factory=lambda: deque(maxlen=_NOTICES_KEPT))
    stats: RunStats | None = None
    services: dict[str, ServiceStatus] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """True once the run has ended."""
        return self.state in ("succeeded", "failed", "cancelled")

    @property
    def succeeded(self) -> bool:
        """True if it ended as planned."""
        return self.state == "succeeded"

    def metric(self, name: str) -> float | None:
        """Return a metric of the last step, or None if it was not reported."""
        return self.metrics.get(name)

    def fold(self, event: RunEvent) -> None:
        """Take in an event. Events come in order; each once."""
        self.last_event_id = event.event_id
        if self.started_at is None:
            self.started_at = event.at
        match event.what:
            case RunStateChanged() as changed:
                self.state, self.reason = changed.state, changed.reason
                if changed.state == "active":
                    self.ended_at, self.stepped = None, False
                else:
                    self.ended_at = event.at
            case StepFinished() as step:
                self._fold_step(step)
            case EvaluationFinished() as evaluation:
                self._fold_evaluation(evaluation)
            case MemberChanged(member=member, gone=True):
                self.members.pop(member.instance_id, None)
            case MemberChanged(member=member):
                self.members[member.instance_id] = member
            case GroupSample(group=group):
                self.sample = group
            case Notice() as notice:
                self.notices.append(notice)

    def fold_run(self, run: Run) -> None:
        """Take in the run's counts, versions and live members."""
        self.stats, self.max_steps, self.groups_per_step = run.stats, run.spec.max_steps, run.spec.groups_per_step
        self.policy_version = run.policy_version
        self.members = {member.instance_id: member for member in run.members}
        if self.state == "waiting":
            self.state, self.started_at = run.state, self.started_at or run.created_at
            self.stepped = run.policy_version > 0

    def fold_service(self, service: ServiceStatus) -> None:
        """Take in how a service is."""
        self.services[service.kind] = service

    def _fold_step(self, step: StepFinished) -> None:
        self.stepped = True
        self.steps_done, self.policy_version, self.metrics = step.step + 1, step.policy_version, step.metrics
        while self.rewards and self.rewards[-1][0] >= step.step:
            self.rewards.pop()
        self.rewards.append((step.step, step.metrics.get(REWARD)))

    def _fold_evaluation(self, evaluation: EvaluationFinished) -> None:
        points = self.evaluations.setdefault(evaluation.evaluation_set, [])
        while points and points[-1].policy_version >= evaluation.policy_version:
            points.pop()
        points.append(EvaluationPoint.of(evaluation.evaluation_set, evaluation.policy_version, evaluation.metrics))


# Of the trainer, by phase; a phase that is not here has nothing to say.
_PHASES = {
    "starting": "loads the model {model}",
    "publishing": "sends weights to the rollouts",
    "evaluating": "evaluates version {version}",
    "waiting_for_batch": "waits for its batch; {ready} of {needed} groups are ready",
    "training": "trains its first batch",
}


def starting(state: RunProgress) -> dict[str, str]:
    """Return what keeps the next step from coming, by service; empty once there was a step, or the run has ended."""
    trainer = state.services.get("trainer")
    if state.ended or (state.stepped and _phase(trainer) != "starting"):
        return {}
    told = {}
    for kind, service in state.services.items():
        if service.error:
            continue
        if service.waiting_for:
            told[kind] = f"waits for {', '.join(service.waiting_for)}"
        elif kind == "trainer" and (phase := _PHASES.get(_phase(service))):
            ready = state.stats.ready + state.stats.leased_to_trainer if state.stats else 0
            values = {"model": state.model, "version": service.details.get("step", 0)}
            told[kind] = phase.format(**values, ready=ready, needed=state.groups_per_step).strip()
    return told


def work_of(service: ServiceStatus) -> list[str]:
    """Return the lines that say what a service that answers is at work with."""
    details: Mapping[str, Any] = service.details
    if "error" in details:  # it answers, but cannot say: the broker without Redis
        return [str(details["error"])]
    if not details:
        return []
    if service.kind == "broker":
        return [_run_line(run) for run in details["runs"]] or ["no runs"]
    if service.kind == "reward":
        return [f"verifiers {', '.join(details['verifiers'])}"]
    run = f"run {details['run_id'] or 'none'}"
    if service.kind == "trainer":
        phase = _phase(service).replace("_", " ")
        return [
            f"{run}, {details['algorithm']} by {details['plugin']} on {details['world_size']} rank(s), {phase}, "
            f"step {details['step']}, published {details['published_version']}, checkpoint {details['checkpoint_step']}"
        ]
    version = int(details["policy_version"])
    return [
        f"{run}, engine {details['engine']}, {f'version {version}' if version >= 0 else 'no weights yet'}, "
        f"{details['running']} running, {details['waiting']} waiting, "
        f"{details['tokens_per_second']:,.0f} generated tokens/s"
        + (", paused for a weight update" if details["paused"] else "")
    ]


def _run_line(run: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in run["stats"].items() if count)
    return f"run {run['run_id']} {run['state']}, version {run['policy_version']}: {counts or 'nothing yet'}"


def _phase(trainer: ServiceStatus | None) -> str:
    phase = str(trainer.details.get("phase", "")) if trainer else ""
    return phase.removeprefix("TRAINER_PHASE_").lower()
