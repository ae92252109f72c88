"""The dashboard's state of a run: RunProgress, as the terminal shows it, metrics by step, the latest samples."""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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
    WeightsPublished,
)
from quartet_client.models import DeadPrompt, Group, Member, Run, ServiceStatus
from quartet_client.progress import RunProgress, figure_of, incomplete

# What the page draws; docs/metrics.md defines them.
DRAWN = (
    "reward/mean",
    "reward/ans_acc",
    "completions/mean_length",
    "staleness/mean",
    "staleness/max",
    "throughput/tokens_per_second",
    "throughput/completions_per_second",
    "time/step",
    "time/waiting_for_batch",
    "time/training",
    "time/publishing",
    "time/evaluating",
    "time/checkpointing",
    "time/idle_fraction",
    "weights/failures",
)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A finished step: when (seconds since 1970) and those of its metrics that are drawn and are numbers."""

    time: float
    metrics: Mapping[str, float]


@dataclass(slots=True)
class Curves:
    """Steps by number and evaluations by set and policy version; an event counts more than the file's row."""

    by_event: dict[int, StepRow] = field(default_factory=dict)
    by_file: dict[int, StepRow] = field(default_factory=dict)
    evaluations: dict[str, dict[int, Mapping[str, float]]] = field(default_factory=dict)
    incomplete: dict[str, dict[int, str]] = field(default_factory=dict)
    _newest_event: int = -1

    def add_event(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Take in a StepFinished. One that is not newer than the last was replayed: what came after it is undone."""
        if step <= self._newest_event:
            for rows in (self.by_event, self.by_file):
                for undone in [each for each in rows if each > step]:
                    del rows[undone]
            for name, points in self.evaluations.items():
                for undone in [version for version in points if version > step + 1]:
                    del points[undone], self.incomplete[name][undone]
        self._newest_event = step
        self.by_event[step] = StepRow(time, _drawn(metrics))

    def add_evaluation(self, name: str, policy_version: int, metrics: Mapping[str, Any]) -> None:
        """Take in an evaluation of a set; of its metrics accuracy, interval and reward are kept."""
        keys = ("ans_acc", "ans_acc_low", "ans_acc_high", "judged", "reward")
        wanted = {key: figure_of(metrics, name, key) for key in keys}
        known = {key: float(value) for key, value in wanted.items() if _is_number(value)}
        self.evaluations.setdefault(name, {})[policy_version] = known
        self.incomplete.setdefault(name, {})[policy_version] = incomplete(metrics, name)

    def add_file_rows(self, anew: bool, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in what metrics.jsonl has more; `anew`: it was written again from its beginning."""
        if anew:
            self.by_file.clear()
        for row in rows:
            kind, step, time = row.get("kind"), row.get("step"), row.get("time")
            if not isinstance(step, int) or not _is_number(time):
                continue
            if kind == "step":
                self.by_file[step] = StepRow(float(time), _drawn(row))
            elif kind == "evaluation" and isinstance(row.get("set"), str):
                self.add_evaluation(row["set"], int(row.get("policy_version", step)), row)

    def rows(self) -> list[tuple[int, StepRow]]:
        """Return all steps in order."""
        return sorted({**self.by_file, **self.by_event}.items())


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _drawn(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(metrics[name]) for name in DRAWN if _is_number(metrics.get(name))}


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points: means of neighbours, and the last point as it is."""
    if len(points) <= most:
        return list(points)
    size = math.ceil((len(points) - 1) / (most - 1))
    body = points[:-1]
    chunks = [body[begin : begin + size] for begin in range(0, len(body), size)]
    means = [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]
    return [*means, points[-1]]


_BUSY_ASKED = 60  # answers of a service over which its idle fraction is told: two minutes


@dataclass(frozen=True, slots=True)
class Happening:
    """A line of the page's list of failures and notices; `level` is "info", "warning" or "error"."""

    at: datetime
    level: str
    text: str
    source: str


@dataclass
class Picture:
    """A run as the page shows it. One task folds, in one event loop; `snapshot` reads it in the same loop.

    Attributes:
        run_id: the run; empty until one is found.
        folder: where its metrics.jsonl is looked for, as a person reads it.
        broker_problem: why the broker does not answer, in a sentence; empty if it does.
        broker_away_since: by time.time(); None if it answers or never did.
        versions: by instance, (time, policy version) at each change.
        busy: whether completions were running at the configured rollout, at each of the last questions.
        weights: the weight updates, oldest first, with their times.
        samples, samples_seen: the last sampled groups, and how many there were.
        dead, dead_total: the newest prompts that were set aside, and how many there are.
    """

    run_id: str = ""
    folder: str = ""
    progress: RunProgress = field(default_factory=lambda: RunProgress(""))
    curves: Curves = field(default_factory=Curves)
    spec: dict[str, object] = field(default_factory=dict)
    broker_problem: str = ""
    broker_away_since: float | None = None
    file_problem: str = ""
    opened_at: float = field(default_factory=time.time)
    weights: deque[tuple[datetime, WeightsPublished]] = field(default_factory=lambda: deque(maxlen=2000))
    versions: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    busy: deque[bool] = field(default_factory=lambda: deque(maxlen=_BUSY_ASKED))
    samples: deque[Group] = field(default_factory=lambda: deque(maxlen=24))
    samples_seen: int = 0
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=100))
    dead: Sequence[DeadPrompt] = ()
    dead_total: int = 0

    def found(self, run_id: str, folder: str) -> None:
        """Begin with a run: nothing is known of it yet."""
        self.run_id, self.folder, self.progress = run_id, folder, RunProgress(run_id)

    def fold(self, event: RunEvent) -> None:
        """Take in an event of the run. Events come in order; each once."""
        self.progress.fold(event)
        at = event.at
        match event.what:
            case StepFinished() as step:
                self.curves.add_event(step.step, at.timestamp(), step.metrics)
                failures = step.metrics.get("weights/failures", 0)
                if failures:
                    told = f"{failures:g} failed attempt{'s' if failures != 1 else ''} at giving version "
                    self._tell(at, "warning", f"{told}{step.policy_version} to the rollouts", "trainer")
            case EvaluationFinished() as evaluation:
                name, version = evaluation.evaluation_set, evaluation.policy_version
                self.curves.add_evaluation(name, version, evaluation.metrics)
            case WeightsPublished() as weights:
                while self.weights and self.weights[-1][1].policy_version >= weights.policy_version:
                    self.weights.pop()  # steps that are trained again, from a checkpoint
                self.weights.append((at, weights))
            case MemberChanged() as changed:
                self._fold_member(at, changed)
            case GroupSample(group=group):
                self.samples.append(group)
                self.samples_seen += 1
            case Notice() as notice:
                self._tell(at, notice.level, notice.text, notice.source)
            case RunStateChanged(state="failed") as changed:
                self._tell(at, "error", f"the run failed: {changed.reason or 'no reason was given'}", "run")

    def fold_run(self, run: Run) -> None:
        """Take in the run's counts and live members."""
        self.progress.fold_run(run)
        if not run.active and not self.progress.ended:
            # The event of the end comes too, unless the broker keeps it no more.
            self.progress.state, self.progress.reason = run.state, run.reason
        self.progress.started_at = self.progress.started_at or run.created_at
        self.spec = {"group_size": run.spec.group_size, "groups_per_step": run.spec.groups_per_step}
        self.spec["max_staleness"] = run.spec.max_staleness
        for member in run.members:
            self._note_version(time.time(), member)

    def fold_service(self, service: ServiceStatus) -> None:
        """Take in how a service answered."""
        self.progress.fold_service(service)
        running, version = service.details.get("running"), service.details.get("policy_version")
        known = isinstance(version, int | str) and int(version) >= 0  # without weights it starts
        if service.kind == "rollout" and isinstance(running, int) and known:
            # Its own answer at a moment of our choosing; the gauges of its heartbeats are those of its own moments.
            self.busy.append(running > 0)

    def broker_answered(self) -> None:
        """The broker is there."""
        self.broker_problem, self.broker_away_since = "", None

    def broker_failed(self, problem: str) -> None:
        """The broker is away: what is shown is its last answer."""
        self.broker_problem = problem
        self.broker_away_since = self.broker_away_since or time.time()

    def _fold_member(self, at: datetime, changed: MemberChanged) -> None:
        member = changed.member
        self._note_version(at.timestamp(), member)
        if changed.gone:
            told = changed.reason or "it left"
            self._tell(at, "info", f"{member.kind} {member.instance_id} is gone: {told}", "broker")

    def _note_version(self, at: float, member: Member) -> None:
        if member.kind != "rollout":
            return
        history = self.versions.setdefault(member.instance_id, [])
        if not history or history[-1][1] != member.policy_version:
            history.append((max(at, history[-1][0]) if history else at, member.policy_version))

    def _tell(self, at: datetime, level: str, text: str, source: str) -> None:
        self.happenings.append(Happening(at, level, text, source))
