"""Generation of a prompt's completions: its sampling parameters override the run's, which override the defaults;
completions that a weight update aborted are generated again.

The temperature of training prompts may follow a schedule: points (version, temperature) and a curve between them
(experience.proto, TemperatureSchedule), evaluated at the policy version at which the generation starts. A completion
keeps its temperature across a weight update, because the trainer divides all its logits by one number.
"""

import math
from bisect import bisect_right
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.sampling import FIRST_RELEASE, SamplingParameters, altered, capability, given
from quartet_rollout.engines.base import Engine, EngineCompletion, PromptError, SamplingSettings, side_by_side


class PromptRefused(Exception):
    """The prompt is invalid, so no attempt can succeed. `field` names the field; the text is one sentence."""

    def __init__(self, field: str, came: object, allowed: str):
        super().__init__(f"{field}: got {came}; allowed: {allowed}")
        self.field, self.came, self.allowed = field, came, allowed


TAKEN_BY = "allowed: rollouts with the vllm engine, or its default"


@dataclass(frozen=True)
class GenerationRequest:
    """A request to the engine for one prompt."""

    n: int
    """Number of completions."""
    settings: SamplingSettings


def sampling_values(prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec, purpose: int) -> dict[str, Any]:
    """Return the sampling parameters that are set, by name; the prompt's override the run's. `n` is always included.

    Unset fields of an evaluation take the values of training, e.g. `max_new_tokens`, except that its `n` is 1 unless
    the prompt or `evaluation_sampling` sets it. For other purposes `n` defaults to the group size (1 without a run).
    """
    values = {"n": spec.group_size or 1, **given(spec.sampling)}
    if purpose == experience_pb2.PURPOSE_EVALUATE:
        values |= {"n": 1, **given(spec.evaluation_sampling)}
    return values | given(prompt.sampling)


def not_taken(engine: Engine, sampling: SamplingParameters) -> dict[str, Any]:
    """Return the parameters that are set but not supported by this engine, with their values."""
    later = {name: value for name, value in altered(sampling).items() if name not in FIRST_RELEASE}
    return {name: value for name, value in later.items() if capability(name) not in engine.capabilities()}


def scheduled(
    request: GenerationRequest, instance: experience_pb2.PromptInstance, spec: broker_pb2.RunSpec, policy_version: int
) -> GenerationRequest:
    """Return the request with the temperature of the run's schedule at a policy version.

    It is unchanged for prompts with their own temperature, prompts not for training, and runs without a schedule.
    """
    if not spec.HasField("temperature_schedule") or instance.purpose != experience_pb2.PURPOSE_TRAIN:
        return request
    if instance.prompt.sampling.HasField("temperature"):
        return request
    value = temperature(spec.temperature_schedule, policy_version)
    return replace(request, settings=request.settings.model_copy(update={"temperature": value}))


def seeded(request: GenerationRequest, instance: experience_pb2.PromptInstance) -> GenerationRequest:
    """Return the request with a seed of the prompt's own, made of its seed and its instance id.

    Equal prompts, and the same one in the next pass, get other noise. An evaluation set gets the same noise in each
    evaluation (common random numbers): the evaluation's mark is left out of the id. Serving prompts keep their seed.
    """
    seed = request.settings.seed
    if seed is None or instance.purpose == experience_pb2.PURPOSE_SERVE:
        return request
    _, at, evaluation = instance.evaluation_id.partition("@")
    name = instance.instance_id.removesuffix(at + evaluation)
    own = int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 2  # completions and turns add to it
    return replace(request, settings=request.settings.model_copy(update={"seed": own}))


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
    """Yield `request.n` completions as they finish; those that a weight update aborted are generated again.

    Raises:
        PromptError: the engine does not support a parameter, or rejects the prompt.
        EngineError: from the engine.
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
    settings = request.settings
    if settings.seed is not None:
        settings = settings.model_copy(update={"seed": settings.seed + index})
    alone = GenerationRequest(1, settings)
    async with aclosing(generate_completions(engine, f"{request_id}/{index}", token_ids, alone)) as stream:
        return replace(await anext(stream), index=index)
