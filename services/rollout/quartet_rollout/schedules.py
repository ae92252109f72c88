"""The temperature of a training prompt, by the policy version that its generation starts with.

A schedule is points (version, temperature) and a curve between them (experience.proto, TemperatureSchedule). A
completion that is carried across a weight update keeps the temperature it began with: it is one number a sample, and
the trainer divides the logits by it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from quartet.v1 import broker_pb2, experience_pb2

from quartet_rollout.sampling import Draw, PromptRefused

_FIELD = "run.temperature_schedule"


def scheduled(
    draw: Draw, instance: experience_pb2.PromptInstance, spec: broker_pb2.RunSpec, policy_version: int
) -> Draw:
    """Return the draw at the temperature that the run's schedule has for a version.

    Unchanged: prompts with a temperature of their own, prompts that are not trained, runs without a schedule.

    Raises:
        PromptRefused: the schedule cannot be used.
    """
    if not spec.HasField("temperature_schedule") or instance.purpose != experience_pb2.PURPOSE_TRAIN:
        return draw
    if instance.prompt.sampling.HasField("temperature"):
        return draw
    schedule = spec.temperature_schedule
    points = tuple((point.policy_version, point.temperature) for point in schedule.points)
    return replace(
        draw, settings=replace(draw.settings, temperature=temperature(points, schedule.curve, policy_version))
    )


@lru_cache(maxsize=64)
def temperature(points: Sequence[tuple[int, float]], curve: int, version: int) -> float:
    """Return the temperature at a version: the first point's before it, the last one's after it.

    Between the points (v0, t0) and (v1, t1), with x = (v - v0) / (v1 - v0): step t0; linear t0 + (t1 - t0) x; cosine
    t0 + (t1 - t0) (1 - cos(pi x)) / 2, the half wave of Loshchilov and Hutter 2017 (SGDR) without restarts.

    Raises:
        PromptRefused: no point, versions that do not rise, a temperature that is not above 0, an unknown curve.
    """
    check(points, curve)
    if version <= points[0][0]:
        return points[0][1]
    for (v0, t0), (v1, t1) in zip(points, points[1:], strict=False):
        if version < v1:
            return t0 + (t1 - t0) * _share(curve, (version - v0) / (v1 - v0))
    return points[-1][1]


def _share(curve: int, x: float) -> float:
    if curve == experience_pb2.TEMPERATURE_CURVE_LINEAR:
        return x
    if curve == experience_pb2.TEMPERATURE_CURVE_COSINE:
        return (1.0 - math.cos(math.pi * x)) / 2
    return 0.0


def check(points: Sequence[tuple[int, float]], curve: int) -> None:
    """Raise PromptRefused unless the schedule can be used."""
    if curve not in experience_pb2.TemperatureCurve.values():
        raise PromptRefused(f"{_FIELD}.curve", curve, ", ".join(experience_pb2.TemperatureCurve.keys()[1:]))
    if not points:
        raise PromptRefused(f"{_FIELD}.points", "none", "at least one")
    for i, (version, value) in enumerate(points):
        if version < 0 or (i and version <= points[i - 1][0]):
            raise PromptRefused(f"{_FIELD}.points[{i}].policy_version", version, ">= 0, rising from point to point")
        if not 0 < value < math.inf:
            raise PromptRefused(f"{_FIELD}.points[{i}].temperature", value, "above 0")
