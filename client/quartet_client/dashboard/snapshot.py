"""The picture as JSON: what the page polls. Times are seconds since 1970, fractions are 0 to 1."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quartet_client.connection import KINDS
from quartet_client.dashboard.picture import Picture, judge
from quartet_client.models import Group, Member, group_fields
from quartet_client.progress import Step, by_whom, problem_of, reward_text, work_of
from quartet_common.verifier_scores import by_verifier

_POINTS = 360  # of a line in a chart: more than a chart has pixels for
_RECENT = 20  # steps of which means are taken
_PHASES = ("waiting_for_batch", "training", "publishing", "evaluating", "checkpointing")
_SPEC = ("group_size", "groups_per_step", "max_staleness")
_LINES = {
    "reward": "reward/mean",
    "accuracy": "reward/ans_acc",
    "length": "completions/mean_length",
    "tokens_per_second": "throughput/tokens_per_second",
    "completions_per_second": "throughput/completions_per_second",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "step_seconds": "time/step",
    "idle": "time/idle_fraction",
}


def snapshot(picture: Picture, now: float) -> dict[str, Any]:
    """Return the whole page's content at a time, small enough to be polled every second."""
    rows = picture.rows()
    verdict = judge(picture, now)
    began = picture.started_at.timestamp() if picture.started_at else (rows[0][1].time if rows else None)
    ended = picture.ended_at.timestamp() if picture.ended_at else None
    if verdict.level == "recorded":
        ended = rows[-1][1].time  # as far as is known
    return {
        "now": now,
        "verdict": asdict(verdict),
        "run": {
            "id": picture.run_id,
            "state": picture.state,
            "folder": picture.folder,
            "steps_done": picture.steps_done,
            "max_steps": picture.max_steps,
            "began": began,
            "ended": ended,
            "policy_version": max(picture.policy_version, picture.steps_done),
            **({name: getattr(picture.spec, name) for name in _SPEC} if picture.spec else {}),
        },
        "broker_away": picture.broker_away_since is not None,
        "lines": _lines(rows, _LINES),
        "verifiers": _lines(rows, _verifiers(rows)),
        "last": _last(rows),
        "by_whom": by_whom(picture.judges),
        "evaluations": _evaluations(picture),
        "phases": _phases(rows),
        "queues": asdict(picture.stats) if picture.stats else None,
        "services": [_service(picture, kind) for kind in KINDS],
        "weights": _weights(picture, now, began),
        "samples": picture.samples_seen,
        "notices": _notices(picture),
        "dead": {"total": picture.dead_total, "prompts": _dead(picture)},
    }


def samples(picture: Picture) -> dict[str, Any]:
    """Return the sampled groups, newest first; not part of `snapshot`, as they are long and change once a step."""
    return {"seen": picture.samples_seen, "groups": [sample_fields(group) for group in reversed(picture.samples)]}


def _verifiers(rows: list[tuple[int, Step]]) -> dict[str, str]:
    """Return the metric of each verifier, by its name, if there are several."""
    metrics = by_verifier(rows[-1][1].metrics, "mean") if rows else {}
    return metrics if len(metrics) > 1 else {}


def _lines(rows: list[tuple[int, Step]], metrics: dict[str, str]) -> dict[str, list[list[float]]]:
    lines = {}
    for name, metric in metrics.items():
        points = [(step + 1.0, row.metrics[metric]) for step, row in rows if metric in row.metrics]
        lines[name] = [[_round(x), _round(y)] for x, y in _thinned(points, _POINTS)]
    return lines


def _last(rows: list[tuple[int, Step]]) -> dict[str, dict[str, float]]:
    """Return the last value of each metric, and its mean over the last steps."""
    recent = rows[-_RECENT:]
    summary = {}
    for name, metric in _LINES.items():
        values = [row.metrics[metric] for _, row in recent if metric in row.metrics]
        if values:
            summary[name] = {"last": _round(values[-1]), "mean": _round(sum(values) / len(values)), "of": len(values)}
    return summary


def _thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points: means of neighbors, and the last point as it is."""
    if len(points) <= most:
        return list(points)
    size = math.ceil((len(points) - 1) / (most - 1))
    body = points[:-1]
    chunks = [body[begin : begin + size] for begin in range(0, len(body), size)]
    means = [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]
    return [*means, points[-1]]


def _evaluations(picture: Picture) -> list[dict[str, Any]]:
    listed = []
    for name in sorted(picture.evaluations):
        *_, last = points = picture.points(name)
        known = [(float(point.policy_version), point.accuracy) for point in points if point.accuracy is not None]
        listed.append(
            {
                "set": name,
                "points": [[x, _round(y)] for x, y in _thinned(known, _POINTS)],
                "by_whom": by_whom(last.judges),
                "reward": reward_text(last) if len(last.rewards) > 1 else "",
                "version": last.policy_version,
                "interval": [_round(each) for each in (*last.interval, last.judged)] if last.interval else [],
                "quoted": {metric: _round(value) for metric, value in last.quoted.items()},
                "incomplete": f"{last.incomplete} at version {last.policy_version}" if last.incomplete else "",
            }
        )
    return listed


def _phases(rows: list[tuple[int, Step]]) -> dict[str, float]:
    """Return the trainer's mean seconds a step in each phase, over the last steps."""
    recent = [row.metrics for _, row in rows[-_RECENT:] if "time/step" in row.metrics]
    means = {phase: sum(each.get(f"time/{phase}", 0.0) for each in recent) / len(recent) for phase in _PHASES if recent}
    return {phase: _round(seconds) for phase, seconds in means.items()}


def _service(picture: Picture, kind: str) -> dict[str, Any]:
    service = picture.services.get(kind)
    members = [member for member in picture.members.values() if member.kind == kind]
    status: dict[str, Any] = {"kind": kind, "state": "unknown", "doing": "", "members": []}
    if service is not None:
        problem = problem_of(service)
        doing = _sentence(service.error or problem) or "; ".join(work_of(service))
        state = "away" if service.health == "unreachable" else "waiting" if problem else "serving"
        if state == "away" and picture.ended:
            state, doing = "stopped", "Not running: the run is over."
        status |= {"state": state, "address": service.address, "build": service.build, "doing": doing}
    status["members"] = [_member(member) for member in members]
    status["idle"] = _idle(picture, kind)
    return status


def _member(member: Member) -> dict[str, Any]:
    return {
        "id": member.instance_id,
        "state": member.state,
        "waiting_for": member.waiting_for,
        "version": member.policy_version,
        "gauges": {name: _round(value) for name, value in member.gauges.items() if math.isfinite(value)},
    }


def _idle(picture: Picture, kind: str) -> dict[str, Any] | None:
    """Return a service's idle fraction and how it was measured; None if unknown."""
    if kind == "trainer":
        phases = _phases(picture.rows())
        total = sum(phases.values())
        if not total:
            return None
        count = min(_RECENT, len(picture.rows()))
        return {"fraction": _round(phases["waiting_for_batch"] / total), "how": f"of the last {count} steps"}
    if kind == "rollout" and picture.busy:
        count = len(picture.busy)
        fraction = _round(1 - sum(picture.busy) / count)
        return {"fraction": fraction, "how": f"(nothing running at {count - sum(picture.busy)} of {count} looks)"}
    service = picture.services.get(kind)
    if service is not None and service.idle_fraction is not None:
        return {"fraction": _round(service.idle_fraction), "how": "of the last minute"}
    return None


def _weights(picture: Picture, now: float, began: float | None) -> dict[str, Any]:
    """Return versions over time, in seconds since the run began: as published, and as each rollout had them."""
    zero = began or 0.0
    published = [(at.timestamp() - zero, float(update.policy_version)) for at, update in picture.weights]
    live = {member.instance_id for member in picture.members.values()}
    rollouts = []
    for name, history in sorted(picture.versions.items(), key=lambda item: item[0] not in live)[:8]:
        points = [(at - zero, float(version)) for at, version in history if version >= 0]
        if points:
            rollouts.append(
                {"id": name, "live": name in live, "points": _stairs(points), "version": int(points[-1][1])}
            )
    last = picture.weights[-1][1] if picture.weights else None
    return {
        "published": _stairs(published),
        "rollouts": rollouts,
        "last": None
        if last is None
        else {
            "version": last.policy_version,
            "seconds": _round(last.seconds),
            "bytes": last.bytes,
            "rollouts": last.rollouts,
        },
    }


def _stairs(points: list[tuple[float, float]]) -> list[list[float]]:
    """Thin by dropping points: a mean of versions would be no version."""
    stride = max(1, math.ceil(len(points) / _POINTS))
    kept = points[::-1][::stride][::-1]
    return [[_round(x), y] for x, y in kept]


def _notices(picture: Picture) -> list[dict[str, Any]]:
    return [{**asdict(each), "at": at.timestamp(), "text": each.text[:2000]} for at, each in reversed(picture.notices)]


def _dead(picture: Picture) -> list[dict[str, Any]]:
    return [
        {
            "id": dead.instance_id,
            "prompt": dead.instance.prompt.text[:400],
            "attempts": dead.attempts,
            "reasons": [reason[:600] for reason in dead.reasons[-3:]],
            "at": dead.died_at.timestamp(),
        }
        for dead in picture.dead
    ]


def _sentence(clause: str) -> str:
    return clause[:1].upper() + clause[1:]


def _round(value: float) -> float:
    """Round to five digits, to keep the JSON small."""
    return float(f"{value:.5g}") if math.isfinite(value) else 0.0


_MOST = 6000  # characters of a text that are shown; a model may write 100,000


def sample_fields(group: Group) -> dict[str, Any]:
    """Return a finished group as the page shows it."""
    return {
        **_cut(group_fields(group)),
        "purpose": group.purpose,
        "rollout": group.rollout_id,
        "at": group.finished_at.timestamp() if group.finished_at else None,
    }


def _cut(value: Any) -> Any:
    """Return a JSON value with long texts cut off."""
    if isinstance(value, dict):
        return {key: _cut(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_cut(each) for each in value]
    if not isinstance(value, str) or len(value) <= _MOST:
        return value
    return f"{value[:_MOST]} … ({len(value) - _MOST:,} characters more)"
