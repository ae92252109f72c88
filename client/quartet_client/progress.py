"""The state of a run: its events, its metrics.jsonl and the status of its services, folded into one plain object.

Metric names are those of docs/metrics.md. `view` draws it in a terminal, `dashboard` in a browser.
"""

import json
import math
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

from quartet.v1 import broker_pb2

from quartet_client.events import (
    EvaluationFinished,
    GroupSample,
    MemberChanged,
    Notice,
    RunEvent,
    RunStateChanged,
    StepFinished,
    WeightsPublished,
)
from quartet_client.models import Evaluation, Group, Member, Run, RunStats, ServiceStatus
from quartet_common.verifier_scores import by_verifier


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def incomplete(metrics: Mapping[str, Any], evaluation_set: str) -> str:
    """Return "incomplete: 78 of 80" if prompts of the evaluation died; else ""."""
    dead = metrics.get(f"eval/{evaluation_set}/dead")
    answered = metrics.get(f"eval/{evaluation_set}/prompts")
    if not isinstance(dead, int | float) or not isinstance(answered, int | float) or not dead:
        return ""
    return incomplete_of(answered, answered + dead)


def incomplete_of(answered: float, prompts: float) -> str:
    """Return "incomplete: 78 of 80"."""
    return f"incomplete: {answered:.0f} of {prompts:.0f}"


REWARD = "reward/mean"
ACCURACY = "reward/ans_acc"
LENGTH = "completions/mean_length"
STALENESS = "staleness/mean"
IDLE = "time/idle_fraction"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
STEP_SECONDS = "time/step"
FAILED_UPDATES = "weights/failures"
KEPT = (
    *(REWARD, ACCURACY, LENGTH, STALENESS, "staleness/max", TOKENS_PER_SECOND, "throughput/completions_per_second"),
    *(STEP_SECONDS, "time/waiting_for_batch", "time/training", "time/publishing", "time/evaluating"),
    *("time/checkpointing", IDLE, FAILED_UPDATES),
)
"""Metrics that are stored of each step, for the charts, beside those of each verifier."""


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step: its time (seconds since 1970) and metrics; `recorded`: from metrics.jsonl, without an event."""

    time: float
    metrics: Mapping[str, float]
    recorded: bool = False

    @classmethod
    def of(cls, at: float, metrics: Mapping[str, Any], recorded: bool = False, whole: bool = False) -> "Step":
        """Return a step with the metrics of KEPT, and of each verifier, that are finite numbers; `whole`: with all."""
        own = (*KEPT, *(name for kind in ("mean", "ans_acc") for name in by_verifier(metrics, kind).values()))
        kept = metrics if whole else own
        return cls(at, {name: float(metrics[name]) for name in kept if is_number(metrics.get(name))}, recorded)


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """An evaluation of a set at a policy version.

    Attributes:
        accuracy: None if no answer was judged, or prompts died.
        incomplete: "incomplete: 78 of 80" if prompts died.
        interval: the ends of the accuracy's 95% interval; None if the trainer gives none.
        judged: completions whose answers were judged.
        rewards: each verifier's mean reward, before its weight; empty if unknown, or if prompts died.
        judges: the verifiers that the accuracy is of.
        quoted: pass@k and maj@k for the largest k, by name; empty with one completion per prompt.
    """

    policy_version: int
    accuracy: float | None
    reward: float | None
    incomplete: str = ""
    interval: tuple[float, float] | None = None
    judged: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)
    judges: tuple[str, ...] = ()
    quoted: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, policy_version: int, metrics: Mapping[str, Any]) -> "EvaluationPoint":
        """Read the metrics of the set `name`; those that are no finite numbers, or of a part of the set, are None."""
        keys, lost = ("ans_acc", "reward", "ans_acc_low", "ans_acc_high", "judged"), incomplete(metrics, name)
        values = (None if lost else metrics.get(f"eval/{name}/{key}") for key in keys)
        accuracy, reward, low, high, judged = (float(value) if is_number(value) else None for value in values)
        interval = None if low is None or high is None else (low, high)
        means = by_verifier({} if lost else metrics, "mean", f"eval/{name}/")
        rewards = {verifier: float(metrics[key]) for verifier, key in means.items() if is_number(metrics[key])}
        judges = tuple(by_verifier(metrics, "ans_acc", f"eval/{name}/"))
        k = max(
            (int(key.rpartition("@")[2]) for key in metrics if re.fullmatch(rf"eval/{re.escape(name)}/avg@\d+", key)),
            default=0,
        )
        of_k = {part: metrics.get(f"eval/{name}/{part}") for part in (f"pass@{k}", f"maj@{k}")}
        quoted = {part: float(value) for part, value in of_k.items() if is_number(value)}
        return cls(policy_version, accuracy, reward, lost, interval, int(judged or 0), rewards, judges, quoted)


def by_whom(judges: Iterable[str]) -> str:
    """Return whose an accuracy is: " by math", " by code and math (weighted mean)"; "" if that is unknown."""
    names = list(judges)
    return f" by {' and '.join(names)}{' (weighted mean)' if len(names) > 1 else ''}" if names else ""


def accuracy_text(of: EvaluationPoint | Evaluation, form: str = ".1%") -> str:
    """Return "81.2% by math (95%: 71.3% to 88.3%, n = 80)", n the judged completions; "–" if none was judged.

    Of several completions per prompt ", pass@8 90.1%, maj@8 85.0%" follows.
    """
    if of.accuracy is None:
        return "–"
    text = f"{of.accuracy:{form}}{by_whom(of.judges)}"
    if of.interval is not None:
        low, high = of.interval
        text += f" (95%: {low:{form}} to {high:{form}}, n = {of.judged})"
    quoted = of.quoted if isinstance(of, EvaluationPoint) else {}
    return "".join([text, *(f", {name} {value:{form}}" for name, value in quoted.items())])


def reward_text(of: EvaluationPoint | Evaluation) -> str:
    """Return "0.500", with each verifier's mean if there are several: "0.500 (close 0.300, length 0.200)"."""
    each = ", ".join(f"{name} {reward:.3f}" for name, reward in of.rewards.items())
    return ("–" if of.reward is None else f"{of.reward:.3f}") + (f" ({each})" if len(of.rewards) > 1 else "")


@dataclass
class RunProgress:
    """The state of a run. `fold` adds an event, `fold_run` the run's counts, `fold_service` a service's status.

    Attributes:
        state: "waiting" before the run's first event, then as Run.state.
        max_steps: steps after which the run ends; 0: when its prompts end.
        stepped: whether a step has finished since the run was created or extended.
        steps: by number. A step that is replayed removes the later ones.
        evaluations: by set and policy version; no set is empty.
        members: live members by instance id.
        samples, samples_seen: the last sampled groups, and the number of all that came.
        services: by kind; empty before the first `fold_service`.
        notices: the last ones and when they were, oldest first.
        weights: the last weight updates and when they were, oldest first.
        versions: of each rollout, (seconds since 1970, policy version) at each change.
        busy: whether completions were running at the configured rollout, at each of its last statuses.
        spec: the run's; None until `fold_run`.
        moved_at: when its counts last changed, by time.monotonic.
        coming: kinds of services that the launcher has started and that were not reached yet.
        whole: whether all metrics of the steps are stored.
    """

    run_id: str = ""
    model: str = ""
    max_steps: int = 0
    state: str = "waiting"
    reason: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    last_event_id: str = ""
    policy_version: int = 0
    stepped: bool = False
    steps: dict[int, Step] = field(default_factory=dict)
    evaluations: dict[str, dict[int, EvaluationPoint]] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    samples: deque[Group] = field(default_factory=lambda: deque(maxlen=24))
    samples_seen: int = 0
    notices: deque[tuple[datetime, Notice]] = field(default_factory=lambda: deque(maxlen=100))
    weights: deque[tuple[datetime, WeightsPublished]] = field(default_factory=lambda: deque(maxlen=2000))
    versions: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    stats: RunStats | None = None
    spec: broker_pb2.RunSpec | None = None
    moved_at: float = 0.0
    services: dict[str, ServiceStatus] = field(default_factory=dict)
    coming: set[str] = field(default_factory=set)
    whole: bool = False
    busy: deque[bool] = field(default_factory=lambda: deque(maxlen=60))  # two minutes
    _newest_event: int = -1  # step

    @property
    def ended(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")

    @property
    def succeeded(self) -> bool:
        return self.state == "succeeded"

    @property
    def steps_done(self) -> int:
        return max(self.steps, default=-1) + 1

    @property
    def last_metrics(self) -> Mapping[str, float]:
        """Metrics of the last step; empty before it."""
        return self.steps[self.steps_done - 1].metrics if self.steps else {}

    @property
    def judges(self) -> tuple[str, ...]:
        """The verifiers that the last step's accuracy is of."""
        return tuple(by_verifier(self.last_metrics, "ans_acc"))

    def rows(self) -> list[tuple[int, Step]]:
        return sorted(self.steps.items())

    def points(self, evaluation_set: str) -> list[EvaluationPoint]:
        """Return the evaluations of a set, oldest version first."""
        return [point for _, point in sorted(self.evaluations.get(evaluation_set, {}).items())]

    def fold(self, event: RunEvent) -> None:
        """Add an event. Events come in order, each once."""
        self.last_event_id = event.event_id
        self.started_at = self.started_at or event.at
        match event.what:
            case RunStateChanged() as changed:
                self.state, self.reason = changed.state, changed.reason
                self.ended_at = event.at if self.ended else None
                self.stepped = self.stepped and self.ended
                if self.state == "failed":
                    text = f"the run failed: {changed.reason or 'no reason was given'}"
                    self.notices.append((event.at, Notice("error", text, "run")))
            case StepFinished() as step:
                self._fold_step(event, step)
            case EvaluationFinished(evaluation_set=name, policy_version=version, metrics=metrics):
                self.evaluations.setdefault(name, {})[version] = EvaluationPoint.of(name, version, metrics)
            case WeightsPublished() as weights:
                while self.weights and self.weights[-1][1].policy_version >= weights.policy_version:
                    self.weights.pop()  # of steps that are trained again, from a checkpoint
                self.weights.append((event.at, weights))
            case MemberChanged() as changed:
                self._fold_member(event, changed)
            case GroupSample(group=group):
                self.samples.append(group)
                self.samples_seen += 1
            case Notice() as notice:
                self.notices.append((event.at, notice))

    def fold_run(self, run: Run) -> None:
        """Add the run's counts, versions and live members."""
        if run.stats != self.stats:
            self.moved_at = time.monotonic()
        self.stats, self.spec, self.max_steps = run.stats, run.spec, run.spec.max_steps
        self.policy_version = run.policy_version
        self.started_at = self.started_at or run.created_at
        self.members = {member.instance_id: member for member in run.members}
        for member in run.members:
            self._note_version(time.time(), member)
        if self.state == "waiting":
            self.stepped = run.policy_version > 0
        if self.state == "waiting" or (self.state == "active" and not run.active):
            # The event of the end comes too, unless the broker no longer stores it.
            self.state, self.reason = run.state, run.reason

    def fold_service(self, service: ServiceStatus) -> None:
        """Add the status of a service."""
        self.services[service.kind] = service
        if not service.error:
            self.coming.discard(service.kind)
        running, version = service.details.get("running"), service.details.get("policy_version")
        known = isinstance(version, int | str) and int(version) >= 0  # -1 before its first weights
        if service.kind == "rollout" and isinstance(running, int) and known:
            # Sampled at our own times: the gauges in its heartbeats are sampled when it chooses to send them.
            self.busy.append(running > 0)

    def fold_rows(self, rewritten: bool, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of metrics.jsonl; a step's event takes precedence. `rewritten`: the file was written again."""
        if rewritten:
            self.steps = {number: step for number, step in self.steps.items() if not step.recorded}
        for row in rows:
            match row:
                case {"kind": "step", "step": int(number), "time": at} if is_number(at):
                    if number not in self.steps or self.steps[number].recorded:
                        self.steps[number] = Step.of(at, row, recorded=True, whole=self.whole)
                case {"kind": "evaluation", "set": str(name), "policy_version": int(version)}:
                    self.evaluations.setdefault(name, {})[version] = EvaluationPoint.of(name, version, row)

    def _fold_step(self, event: RunEvent, step: StepFinished) -> None:
        if step.step <= self._newest_event:
            self.steps = {number: done for number, done in self.steps.items() if number < step.step}
            for name, points in list(self.evaluations.items()):
                for undone in [version for version in points if version > step.policy_version]:
                    del points[undone]
                if not points:
                    del self.evaluations[name]
        self._newest_event, self.stepped, self.policy_version = step.step, True, step.policy_version
        self.steps[step.step] = Step.of(event.at.timestamp(), step.metrics)
        if failures := step.metrics.get(FAILED_UPDATES, 0):
            text = f"{failures:g} failed attempt{'s' if failures != 1 else ''} at giving version "
            notice = Notice("warning", f"{text}{step.policy_version} to the rollouts", "trainer")
            self.notices.append((event.at, notice))

    def _fold_member(self, event: RunEvent, changed: MemberChanged) -> None:
        member = changed.member
        self._note_version(event.at.timestamp(), member)
        self.members[member.instance_id] = member
        if changed.gone:
            del self.members[member.instance_id]
            text = f"{member.kind} {member.instance_id} is gone: {changed.reason or 'it left'}"
            self.notices.append((event.at, Notice("info", text, "broker")))

    def _note_version(self, at: float, member: Member) -> None:
        if member.kind != "rollout":
            return
        history = self.versions.setdefault(member.instance_id, [])
        if not history or history[-1][1] != member.policy_version:
            history.append((max(at, history[-1][0]) if history else at, member.policy_version))


_MAX_READ = 16 << 20  # bytes per read, so that a long file does not delay the page


class MetricsFile:
    """Follows a metrics.jsonl (docs/metrics.md), which the trainer may truncate and continue from a checkpoint.

    Attributes:
        problem: why it, or one of its lines, cannot be read, in a sentence; empty while there is no file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.problem = ""
        self._position = 0
        self._last_line = b""  # before `_position`; if it differs, the file was written again
        self._bad_line = ""  # the problem of the last line that is no JSON

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was written again since the last call, and at most 16 MiB of new rows."""
        rewritten = False
        try:
            with self.path.open("rb") as file:
                file.seek(self._position - len(self._last_line))
                if rewritten := file.read(len(self._last_line)) != self._last_line:
                    self._position, self._last_line, self._bad_line = 0, b"", ""
                file.seek(self._position)
                fresh = file.read(_MAX_READ)
        except FileNotFoundError:
            rewritten, fresh = self._position > 0, b""
            self._position, self._last_line, self._bad_line = 0, b"", ""
        except OSError as error:
            self.problem = f"{self.path} cannot be read: {error.strerror}"
            return False, []
        whole = fresh[: fresh.rfind(b"\n") + 1]  # the last line may be half written
        if whole:
            self._position += len(whole)
            self._last_line = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        rows = [row for line in whole.splitlines() if isinstance(row := self._row(line), dict)]
        self.problem = self._bad_line
        return rewritten, rows

    def _row(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            self._bad_line = f"{self.path} has a line that is no JSON: {error}"


def read_run(folder: Path) -> RunProgress:
    """Return a run as its folder's metrics.jsonl has it, if there is one.

    Of a step that a resumed run wrote twice, the last row counts.
    """
    progress, file = RunProgress(folder.resolve().name, whole=True), MetricsFile(folder / "metrics.jsonl")
    while (read := file.read())[1]:
        progress.fold_rows(*read)
    return progress


# What the trainer does, by phase; other phases are not shown.
_PHASES = {
    "starting": "loads the model {model}",
    "publishing": "sends weights to the rollouts",
    "evaluating": "evaluates version {version}",
    "waiting_for_batch": "waits for its batch; {ready} of {needed} groups are ready",
    "training": "trains its first batch",
}


def starting(state: RunProgress) -> dict[str, str]:
    """Return by service what delays the first step; empty once a step has finished or the run has ended."""
    trainer = state.services.get("trainer")
    if state.ended or (state.stepped and _phase(trainer) != "starting"):
        return {}
    doing = {}
    for kind, service in state.services.items():
        if service.error:
            if kind in state.coming:
                doing[kind] = "is starting"
            continue
        if service.waiting_for:
            doing[kind] = f"waits for {', '.join(service.waiting_for)}"
        elif kind == "trainer" and (phase := _PHASES.get(_phase(service))):
            values = {"model": state.model, "version": service.details.get("step", 0)}
            ready, needed = first_batch(state)
            doing[kind] = phase.format(**values, ready=ready, needed=needed).strip()
    return doing


def first_batch(state: RunProgress) -> tuple[int, int]:
    """Return how many groups of the first step's batch are ready, and how many it needs."""
    ready = state.stats.ready + state.stats.leased_to_trainer if state.stats else 0
    return ready, state.spec.groups_per_step if state.spec else 0


def problem_of(service: ServiceStatus) -> str:
    """Return a service's problem as a clause; empty if it serves and waits for nothing."""
    if service.health == "unreachable":
        return f"the {service.kind} cannot be reached at {service.address}"
    waits = f"waits for {', '.join(service.waiting_for)}" if service.waiting_for else ""
    if service.health != "serving":
        return f"the {service.kind} is {service.health.replace('_', ' ')}{waits and f': it {waits}'}"
    if waits:
        return f"the {service.kind} {waits}"
    problem = service.details.get("error")
    return f"the {service.kind} cannot report its status: {problem}" if problem else ""


def work_of(service: ServiceStatus) -> list[str]:
    """Return lines about the current work of a service that can be reached."""
    details: Mapping[str, Any] = service.details
    if "error" in details:  # the status call failed: the broker without Redis
        return [str(details["error"])]
    if not details:
        return []
    if service.kind == "broker":
        return [_run_line(run) for run in details["runs"]] or ["no runs"]
    if service.kind == "reward":
        return [f"verifiers {', '.join(details['verifiers'])}"]
    if service.kind == "environment":
        return [f"environments {', '.join(details['environments']) or 'none'}"]
    run = f"run {details['run_id'] or 'none'}"
    if service.kind == "trainer":
        phase = _phase(service).replace("_", " ")
        steps = f"published {details['published_version']}, checkpoint {details['checkpoint_step']}"
        return [
            f"{run}, {details['algorithm']} by {details['plugin']} on {details['world_size']} rank(s), {phase}, "
            f"step {details['step']}, {steps}",
            *([f"warning: {details['warning']}"] if details.get("warning") else ()),
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
