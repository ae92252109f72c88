"""Completions of one prompt from the engine, begun again where a weight update aborted them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from quartet_rollout.engines.base import Engine, EngineCompletion, SamplingSettings
from quartet_rollout.sampling import Draw


async def draw_completions(
    engine: Engine, request_id: str, token_ids: np.ndarray, draw: Draw
) -> AsyncGenerator[EngineCompletion, None]:
    """Yield `draw.n` completions as they finish; those that a weight update aborted are started again."""
    aborted = []
    async with aclosing(engine.generate(request_id, token_ids, draw.n, draw.settings)) as stream:
        async for completion in stream:
            if completion.finish_reason == "abort":
                aborted.append(completion.index)
            else:
                yield completion
    for index in aborted:
        again = Draw(1, _seeded(draw.settings, index))
        async with aclosing(draw_completions(engine, f"{request_id}/{index}", token_ids, again)) as stream:
            async for completion in stream:
                yield replace(completion, index=index)


def _seeded(settings: SamplingSettings, index: int) -> SamplingSettings:
    return settings if settings.seed is None else replace(settings, seed=settings.seed + index)
