"""The dashboard's state of a run: RunProgress, metrics by step, the latest samples; its first line, the verdict."""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from quartet_client.connection import KINDS
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
from quartet_client.progress import EvaluationPoint, RunProgress, is_number

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
    evaluations: dict[str, dict[int, EvaluationPoint]] = field(default_factory=dict)
    _newest_event: int = -1

    def add_event(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Take in a StepFinished. One that is not newer than the last was replayed: what came after it is undone."""
        if step <= self._newest_event:
            for rows in (self.by_event, self.by_file):
                for undone in [each for each in rows if each > step]:
                    del rows[undone]
            for points in self.evaluations.values():
                for undone in [version for version in points if version > step + 1]:
                    del points[undone]
        self._newest_event = step
        self.by_event[step] = StepRow(time, _drawn(metrics))

    def add_evaluation(self, name: str, policy_version: int, metrics: Mapping[str, Any]) -> None:
        """Take in an evaluation of a set."""
        self.evaluations.setdefault(name, {})[policy_version] = EvaluationPoint.of(name, policy_version, metrics)

    def add_file_rows(self, anew: bool, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in what metrics.jsonl has more; `anew`: it was written again from its beginning."""
        if anew:
            self.by_file.clear()
        for row in rows:
            kind, step, time = row.get("kind"), row.get("step"), row.get("time")
            if not isinstance(step, int) or not is_number(time):
                continue
            if kind == "step":
                self.by_file[step] = StepRow(float(time), _drawn(row))
            elif kind == "evaluation" and isinstance(row.get("set"), str):
                self.add_evaluation(row["set"], int(row.get("policy_version", step)), row)

    def rows(self) -> list[tuple[int, StepRow]]:
        """Return all steps in order."""
        return sorted({**self.by_file, **self.by_event}.items())


def _drawn(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(metrics[name]) for name in DRAWN if is_number(metrics.get(name))}


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


_LEAST_PATIENCE = 60.0  # seconds without a step that are never called a stall
_STEPS_OF_PATIENCE = 6  # nor is this many times the longest of the last steps
_LAST_STEPS = 20
_FIRST_STEP_PATIENCE = 600.0  # until a first step: engines start, models load, the first batch is made
_NO_RUN = "The broker answers, but has no run yet: start one with quartet run."
_AWAY_TOLD_AFTER = 3.0  # seconds; a broker that is restarted is away for less


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the run is.

    Attributes:
        level: "healthy", "attention" (it goes on, but something is wrong), "waiting", "stalled", "failed", "cancelled",
            "finished", "unknown" (the broker does not answer) or "recorded" (there is none: only files).
        word: the level for people.
        sentence: why, and what to do about it where that is known.
    """

    level: str
    word: str
    sentence: str


def judge(picture: Picture, now: float) -> Verdict:
    """Return the verdict at a time (seconds since 1970, by the clock of this machine)."""
    progress = picture.progress
    rows = picture.curves.rows()
    if progress.ended:
        return _ended(picture, rows)
    away = picture.broker_away_since
    if away is not None and (now - away >= _AWAY_TOLD_AFTER or not picture.run_id):
        return _without_broker(picture, rows, now, away)
    if not picture.run_id or progress.state == "waiting":
        known = f"The broker has no run '{picture.run_id}' yet." if picture.run_id else _NO_RUN
        return Verdict("waiting", "Waiting for a run", known)
    troubles = _troubles(picture)
    needs = _needs(picture)
    if not rows:
        return _before_first_step(picture, needs, now)
    since = max(0.0, now - rows[-1][1].time)
    if since > patience(rows):
        waits = f" {_listed(needs)}." if needs else " Every service answers; the logs of the trainer may tell more."
        word = f"Stalled: waiting for {_names(picture)}" if needs else "Stalled"
        return Verdict("stalled", word, f"No step for {span(since)}; the last ones took {_pace(rows)}.{waits}")
    sentence = f"{_steps_done(picture, rows)}, the last {span(since)} ago; a step takes {_pace(rows)}."
    if needs:
        troubles = [*needs, *troubles]
    if troubles:
        return Verdict("attention", "Running, but look", f"{_listed(troubles)}. {sentence}")
    return Verdict("healthy", "Healthy", f"{sentence} All four services are serving.")


def patience(rows: Sequence[tuple[int, StepRow]]) -> float:
    """Return the seconds without a step after which a run that had these is stalled."""
    lasted = [row.metrics["time/step"] for _, row in rows[-_LAST_STEPS:] if "time/step" in row.metrics]
    return max(_LEAST_PATIENCE, _STEPS_OF_PATIENCE * max(lasted, default=0.0))


def span(seconds: float) -> str:
    """Return a length of time as people say it: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def service_problem(service: ServiceStatus) -> str:
    """Return what a service lacks, as a clause; empty if it serves and waits for nothing."""
    if service.health == "unreachable":
        return f"the {service.kind} cannot be reached at {service.address}"
    if service.health != "serving":
        waits = f": it waits for {', '.join(service.waiting_for)}" if service.waiting_for else ""
        return f"the {service.kind} is {service.health.replace('_', ' ')}{waits}"
    if service.waiting_for:
        return f"the {service.kind} waits for {', '.join(service.waiting_for)}"
    problem = service.details.get("error")
    return f"the {service.kind} cannot say how it is: {problem}" if problem else ""


def _ended(picture: Picture, rows: Sequence[tuple[int, StepRow]]) -> Verdict:
    progress = picture.progress
    reason = f" Reason: {progress.reason.rstrip('.')}." if progress.reason else ""
    if progress.state == "succeeded":
        gained = _gain(picture)
        return Verdict("finished", "Finished", f"{_steps_done(picture, rows)}.{gained}")
    if progress.state == "cancelled":
        return Verdict("cancelled", "Cancelled", f"It was stopped after {_count(rows)}.{reason}")
    return Verdict("failed", "Failed", f"It ended after {_count(rows)}.{reason or ' No reason was given.'}")


def _without_broker(picture: Picture, rows: Sequence[tuple[int, StepRow]], now: float, away: float) -> Verdict:
    shown = f" Shown is what was known: {_count(rows)}." if rows else ""
    if rows and not picture.progress.rewards:
        last = span(max(0.0, now - rows[-1][1].time))
        shown = f" Shown is what {picture.folder}/metrics.jsonl has: {_count(rows)}, the last one {last} ago."
        if now - rows[-1][1].time > patience(rows):
            sentence = f"There is no broker to ask: {_stopped(picture.broker_problem)}{shown}"
            return Verdict("recorded", "A recorded run", sentence)
    sentence = f"No answer for {span(now - away)}: {_stopped(picture.broker_problem)}{shown} This page keeps asking."
    return Verdict("unknown", "Broker away", sentence)


def _before_first_step(picture: Picture, needs: Sequence[str], now: float) -> Verdict:
    progress = picture.progress
    began = progress.started_at.timestamp() if progress.started_at else picture.opened_at
    waited = max(0.0, now - began)
    stats, wanted = progress.stats, picture.spec.get("groups_per_step", 0)
    ready = stats.ready + stats.leased_to_trainer if stats else 0
    what = f"Every service is up; {ready} of the {wanted} groups of the first step are there."
    if needs:
        what = f"{_listed(needs)}."
    if waited > _FIRST_STEP_PATIENCE:
        return Verdict("stalled", "Stalled", f"No first step for {span(waited)}. {what}")
    who = _names(picture)
    return Verdict("waiting", f"Waiting for {who}", f"{what} The run began {span(waited)} ago.")


def _names(picture: Picture) -> str:
    kinds = [kind for kind in KINDS if kind in picture.progress.services]
    held_up = [kind for kind in kinds if service_problem(picture.progress.services[kind])]
    away = [kind for kind in held_up if picture.progress.services[kind].health == "unreachable"]
    named = away or held_up
    return "the " + " and the ".join(named) if named else "the first step"


def _needs(picture: Picture) -> list[str]:
    services = picture.progress.services
    problems = [service_problem(services[kind]) for kind in KINDS if kind in services]
    waiting = [
        f"{member.kind} {member.instance_id} waits for {member.waiting_for}"
        for member in picture.progress.members.values()
        if member.waiting_for and not any(member.waiting_for in problem for problem in problems)
    ]
    return [each for each in [*problems, *waiting] if each]


def _troubles(picture: Picture) -> list[str]:
    told = []
    stats = picture.progress.stats
    if stats is not None and stats.dead:
        told.append(f"{stats.dead} prompt{'s were' if stats.dead != 1 else ' was'} set aside as dead (see Failures)")
    failures = sum(row.metrics.get("weights/failures", 0) for _, row in picture.curves.rows()[-_LAST_STEPS:])
    if failures:
        told.append(f"{failures:g} weight update{'s' if failures != 1 else ''} failed in the last {_LAST_STEPS} steps")
    if picture.file_problem:
        told.append(picture.file_problem)
    return told


def _gain(picture: Picture) -> str:
    for name, points in picture.curves.evaluations.items():
        known = [point.accuracy for _, point in sorted(points.items()) if point.accuracy is not None]
        if len(known) > 1:
            return f" Accuracy on {name} went from {known[0]:.0%} to {known[-1]:.0%}."
    return ""


def _steps_done(picture: Picture, rows: Sequence[tuple[int, StepRow]]) -> str:
    done, most = rows[-1][0] + 1 if rows else 0, picture.progress.max_steps
    return f"{done} of {most} steps done" if most else f"{_count(rows)} done"


def _count(rows: Sequence[tuple[int, StepRow]]) -> str:
    done = rows[-1][0] + 1 if rows else 0
    return f"{done} step{'s' if done != 1 else ''}"


def _pace(rows: Sequence[tuple[int, StepRow]]) -> str:
    lasted = sorted(row.metrics["time/step"] for _, row in rows[-_LAST_STEPS:] if "time/step" in row.metrics)
    return span(lasted[len(lasted) // 2]) if lasted else "an unknown time"


def _stopped(clause: str) -> str:
    return clause if clause.endswith(("?", "!", ".")) else f"{clause}."


def _listed(clauses: Sequence[str]) -> str:
    text = "; ".join(clauses[:3]) + (f"; and {len(clauses) - 3} more" if len(clauses) > 3 else "")
    return text[:1].upper() + text[1:]
