"""A run's metrics by step, from its events and from its metrics.jsonl, and thinned out for a chart."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from quartet_client.evaluations import figure_of, incomplete

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
