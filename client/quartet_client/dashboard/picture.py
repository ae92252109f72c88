"""The dashboard's state of a run, and its first line, the verdict."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from quartet_client.connection import KINDS
from quartet_client.models import DeadPrompt
from quartet_client.progress import FAILED_UPDATES, STEP_SECONDS, RunProgress, Step, by_whom, first_batch, problem_of


@dataclass
class Picture(RunProgress):
    """A run as the page shows it; changed and read in one event loop.

    Attributes:
        run_id: the run; empty until one is found.
        folder: of its metrics.jsonl, as text.
        broker_problem: why the broker does not answer, in a sentence; empty if it does.
        broker_away_since: time of the first failed call; None if the broker answers or was not asked yet.
        dead, dead_total: the oldest dead prompts, and the number of all.
    """

    folder: str = ""
    broker_problem: str = ""
    broker_away_since: float | None = None
    file_problem: str = ""
    opened_at: float = field(default_factory=time.time)
    dead: Sequence[DeadPrompt] = ()
    dead_total: int = 0

    def broker_answered(self) -> None:
        self.broker_problem, self.broker_away_since = "", None

    def broker_failed(self, problem: str) -> None:
        self.broker_problem = problem
        self.broker_away_since = self.broker_away_since or time.time()


_LEAST_PATIENCE = 60.0  # seconds without a step that are never called a stall
_STEPS_OF_PATIENCE = 6  # nor is this many times the longest of the last steps
_LAST_STEPS = 20
_FIRST_STEP_PATIENCE = 600.0  # until a first step: engines start, models load, the first batch is made
_NO_RUN = "The broker answers, but has no run yet: start one with quartet run."
_AWAY_TOLD_AFTER = 3.0  # seconds; a broker that is restarted is away for less


@dataclass(frozen=True, slots=True)
class RunHealth:
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


def judge(picture: Picture, now: float) -> RunHealth:
    """Return the verdict at a time (seconds since 1970, by the clock of this machine)."""
    rows = picture.rows()
    if picture.ended:
        return _ended(picture, rows)
    away = picture.broker_away_since
    if away is not None and (now - away >= _AWAY_TOLD_AFTER or not picture.run_id):
        return _without_broker(picture, rows, now, away)
    if not picture.run_id or picture.state == "waiting":
        known = f"The broker has no run '{picture.run_id}' yet." if picture.run_id else _NO_RUN
        return RunHealth("waiting", "Waiting for a run", known)
    troubles = _troubles(picture)
    needs = _needs(picture)
    if not rows:
        return _before_first_step(picture, needs, now)
    since = max(0.0, now - rows[-1][1].time)
    if since > patience(rows):
        waits = f" {_listed(needs)}." if needs else " Every service answers; see the log of the trainer."
        word = f"Stalled: waiting for {_names(picture)}" if needs else "Stalled"
        return RunHealth("stalled", word, f"No step for {span(since)}; the last ones took {_pace(rows)}.{waits}")
    sentence = f"{_steps_done(picture, rows)}, the last {span(since)} ago; a step takes {_pace(rows)}."
    if needs:
        troubles = [*needs, *troubles]
    if troubles:
        return RunHealth("attention", "Running, but look", f"{_listed(troubles)}. {sentence}")
    return RunHealth("healthy", "Healthy", f"{sentence} All four services are serving.")


def patience(rows: Sequence[tuple[int, Step]]) -> float:
    """Return after how many seconds without a step a run with these steps is stalled."""
    lasted = [row.metrics[STEP_SECONDS] for _, row in rows[-_LAST_STEPS:] if STEP_SECONDS in row.metrics]
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


def _ended(picture: Picture, rows: Sequence[tuple[int, Step]]) -> RunHealth:
    reason = f" Reason: {picture.reason.rstrip('.')}." if picture.reason else ""
    if picture.state == "succeeded":
        return RunHealth("finished", "Finished", f"{_steps_done(picture, rows)}.{_gain(picture)}")
    if picture.state == "cancelled":
        return RunHealth("cancelled", "Cancelled", f"It was stopped after {_count(rows)}.{reason}")
    return RunHealth("failed", "Failed", f"It ended after {_count(rows)}.{reason or ' No reason was given.'}")


def _without_broker(picture: Picture, rows: Sequence[tuple[int, Step]], now: float, away: float) -> RunHealth:
    shown = f" The page shows the last known state: {_count(rows)}." if rows else ""
    if rows and all(row.recorded for _, row in rows):
        last = span(max(0.0, now - rows[-1][1].time))
        shown = f" The page shows {picture.folder}/metrics.jsonl: {_count(rows)}, the last one {last} ago."
        if now - rows[-1][1].time > patience(rows):
            sentence = f"The broker does not answer: {_with_period(picture.broker_problem)}{shown}"
            return RunHealth("recorded", "A recorded run", sentence)
    sentence = f"No answer for {span(now - away)}: {_with_period(picture.broker_problem)}{shown} The page retries."
    return RunHealth("unknown", "Broker away", sentence)


def _before_first_step(picture: Picture, needs: Sequence[str], now: float) -> RunHealth:
    began = picture.started_at.timestamp() if picture.started_at else picture.opened_at
    waited = max(0.0, now - began)
    ready, wanted = first_batch(picture)
    what = f"Every service is up; {ready} of the {wanted} groups of the first step are there."
    if needs:
        what = f"{_listed(needs)}."
    if waited > _FIRST_STEP_PATIENCE:
        return RunHealth("stalled", "Stalled", f"No first step for {span(waited)}. {what}")
    who = _names(picture)
    return RunHealth("waiting", f"Waiting for {who}", f"{what} The run began {span(waited)} ago.")


def _names(picture: Picture) -> str:
    kinds = [kind for kind in KINDS if kind in picture.services]
    held_up = [kind for kind in kinds if problem_of(picture.services[kind])]
    away = [kind for kind in held_up if picture.services[kind].health == "unreachable"]
    named = away or held_up
    return "the " + " and the ".join(named) if named else "the first step"


def _needs(picture: Picture) -> list[str]:
    services = picture.services
    problems = [problem_of(services[kind]) for kind in KINDS if kind in services]
    waiting = [
        f"{member.kind} {member.instance_id} waits for {member.waiting_for}"
        for member in picture.members.values()
        if member.waiting_for and not any(member.waiting_for in problem for problem in problems)
    ]
    return [each for each in [*problems, *waiting] if each]


def _troubles(picture: Picture) -> list[str]:
    notes = []
    stats = picture.stats
    if stats is not None and stats.dead:
        notes.append(f"{stats.dead} prompt{'s were' if stats.dead != 1 else ' was'} set aside as dead (see Failures)")
    failures = sum(row.metrics.get(FAILED_UPDATES, 0) for _, row in picture.rows()[-_LAST_STEPS:])
    if failures:
        notes.append(f"{failures:g} weight update{'s' if failures != 1 else ''} failed in the last {_LAST_STEPS} steps")
    if picture.file_problem:
        notes.append(picture.file_problem)
    return notes


def _gain(picture: Picture) -> str:
    for name in picture.evaluations:
        known = [point for point in picture.points(name) if point.accuracy is not None]
        if len(known) > 1:
            first, last = known[0].accuracy, known[-1].accuracy
            return f" Accuracy{by_whom(known[-1].judges)} on {name} went from {first:.0%} to {last:.0%}."
    return ""


def _steps_done(picture: Picture, rows: Sequence[tuple[int, Step]]) -> str:
    done, most = rows[-1][0] + 1 if rows else 0, picture.max_steps
    return f"{done} of {most} steps done" if most else f"{_count(rows)} done"


def _count(rows: Sequence[tuple[int, Step]]) -> str:
    done = rows[-1][0] + 1 if rows else 0
    return f"{done} step{'s' if done != 1 else ''}"


def _pace(rows: Sequence[tuple[int, Step]]) -> str:
    lasted = sorted(row.metrics[STEP_SECONDS] for _, row in rows[-_LAST_STEPS:] if STEP_SECONDS in row.metrics)
    return span(lasted[len(lasted) // 2]) if lasted else "an unknown time"


def _with_period(clause: str) -> str:
    return clause if clause.endswith(("?", "!", ".")) else f"{clause}."


def _listed(clauses: Sequence[str]) -> str:
    text = "; ".join(clauses[:3]) + (f"; and {len(clauses) - 3} more" if len(clauses) > 3 else "")
    return text[:1].upper() + text[1:]
