"""How a prompt's completions are generated: its sampling parameters over the run's over the defaults, and the loop that
begins completions again where a weight update aborted them.

The temperature of a training prompt may follow a schedule: points (version, temperature) and a curve between them
(experience.proto, TemperatureSchedule), read at the policy version that the generation starts with. A completion that
is carried across a weight update keeps the temperature it began with: it is one number a sample, and the trainer
divides the logits by it.
"""

import math
from bisect import bisect_right
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.sampling import FIRST_RELEASE, SamplingParameters, altered, capability, given
from quartet_rollout.engines.base import Engine, EngineCompletion, PromptError, SamplingSettings, side_by_side


class PromptRefused(Exception):
    """A prompt that can never be generated from, as it is. `field` is where, the text is one sentence."""

    def __init__(self, field: str, came: object, allowed: str):
        super().__init__(f"{field}: got {came}; allowed: {allowed}")
        self.field, self.came, self.allowed = field, came, allowed


TAKEN_BY = "allowed: rollouts with the vllm engine, or its default"


@dataclass(frozen=True)
class GenerationRequest:
    """What is asked of the engine for one prompt."""

    n: int
    """Completions."""
    settings: SamplingSettings
    """How each is sampled."""


def sampling_values(prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec, purpose: int) -> dict[str, Any]:
    """Return the sampling parameters that are set, by name: the prompt's over the run's. `n` is always there.

    An evaluation's unset fields take the training sampling's values, so that `max_new_tokens` need not be said twice;
    but its `n` is 1 unless the prompt or `evaluation_sampling` says more. Otherwise it is the group size (1 without a
    run).
    """
    values = {"n": spec.group_size or 1, **given(spec.sampling)}
    if purpose == experience_pb2.PURPOSE_EVALUATE:
        values |= {"n": 1, **given(spec.evaluation_sampling)}
    return values | given(prompt.sampling)


def not_taken(engine: Engine, sampling: SamplingParameters) -> dict[str, Any]:
    """Return the parameters that are set and that this engine does not take, with their values."""
    later = {name: value for name, value in altered(sampling).items() if name not in FIRST_RELEASE}
    return {name: value for name, value in later.items() if capability(name) not in engine.capabilities()}


def scheduled(
    request: GenerationRequest, instance: experience_pb2.PromptInstance, spec: broker_pb2.RunSpec, policy_version: int
) -> GenerationRequest:
    """Return the request at the temperature that the run's schedule has for a version.

    Unchanged: prompts with a temperature of their own, prompts that are not trained, runs without a schedule.
    """
    if not spec.HasField("temperature_schedule") or instance.purpose != experience_pb2.PURPOSE_TRAIN:
        return request
    if instance.prompt.sampling.HasField("temperature"):
        return request
    value = temperature(spec.temperature_schedule, policy_version)
    return replace(request, settings=request.settings.model_copy(update={"temperature": value}))


def temperature(schedule: experience_pb2.TemperatureSchedule, version: int) -> float:
    """Return the temperature at a version: the first point's before it, the last one's after it.

    Between the points (v0, t0) and (v1, t1), with x = (v - v0) / (v1 - v0): step t0; linear t0 + (t1 - t0) x; cosine
    t0 + (t1 - t0) (1 - cos(pi x)) / 2, the half wave of Loshchilov and Hutter 2017 (SGDR) without restarts.

    The broker has checked the points. Raises PromptRefused for a curve of a later release.
    """
    points = schedule.points
    after = bisect_right(points, version, key=lambda point: point.policy_version)
    if after in (0, len(points)):
        return points[max(after - 1, 0)].temperature
    first, second = points[after - 1], points[after]
    x = (version - first.policy_version) / (second.policy_version - first.policy_version)
    match schedule.curve:
        case experience_pb2.TEMPERATURE_CURVE_UNSPECIFIED | experience_pb2.TEMPERATURE_CURVE_STEP:
            share = 0.0
        case experience_pb2.TEMPERATURE_CURVE_LINEAR:
            share = x
        case experience_pb2.TEMPERATURE_CURVE_COSINE:
            share = (1.0 - math.cos(math.pi * x)) / 2
        case curve:
            allowed = ", ".join(experience_pb2.TemperatureCurve.keys()[1:])
            raise PromptRefused("run.temperature_schedule.curve", curve, allowed)
    return first.temperature + (second.temperature - first.temperature) * share


async def generate_completions(
    engine: Engine, request_id: str, token_ids: np.ndarray, request: GenerationRequest
) -> AsyncGenerator[EngineCompletion, None]:
    """Yield `request.n` completions as they finish; those that a weight update aborted are started again.

    Raises:
        PromptError: the engine does not take a parameter, or as the engine raises it.
    """
    for name, value in not_taken(engine, request.settings).items():
        raise PromptError(f"sampling.{name} is {value}, which this rollout's engine does not take; {TAKEN_BY}")
    aborted = []
    async with aclosing(engine.generate(request_id, token_ids, request.n, request.settings)) as stream:
        async for completion in stream:
            if completion.finish_reason == "abort":
                aborted.append(completion.index)
            else:
                yield completion
    again = (_generate_again(engine, request_id, token_ids, request, index) for index in aborted)
    async with aclosing(side_by_side(again)) as stream:
        async for completion in stream:
            yield completion


async def _generate_again(
    engine: Engine, request_id: str, token_ids: np.ndarray, request: GenerationRequest, index: int
) -> EngineCompletion:
    alone = GenerationRequest(1, _seeded(request.settings, index))
    async with aclosing(generate_completions(engine, f"{request_id}/{index}", token_ids, alone)) as stream:
        return replace(await anext(stream), index=index)


def _seeded(settings: SamplingSettings, index: int) -> SamplingSettings:
    return settings if settings.seed is None else settings.model_copy(update={"seed": settings.seed + index})
