"""The life of one prompt group: prompt -> completions -> scores -> experience.

    state        what ends it well        what ends it otherwise
    GENERATING   all completions done     prompt refused, engine failed, pinned version gone, lease lost
    SCORING      all scores there         verifier failed, lease lost
    PUTTING      the broker's outcome     refused, lease lost

However it ends, its lease is settled exactly once: by the put, by giving it back, or by the broker that took it away.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from enum import Enum

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2

from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    Engine,
    EngineCompletion,
    EngineError,
    PromptError,
    SamplingSettings,
)
from quartet_rollout.experience import ScoredCompletion, build_group, versions_of
from quartet_rollout.prompts import PromptReader
from quartet_rollout.sampling import Draw, PromptRefused
from quartet_rollout.scoring import Scorer, ScoringFailed
from quartet_rollout.telemetry import COMPLETIONS, TOKENS

_PURPOSES = {
    experience_pb2.PURPOSE_TRAIN: "train",
    experience_pb2.PURPOSE_EVALUATE: "evaluate",
    experience_pb2.PURPOSE_SERVE: "serve",
}


class Stage(Enum):
    """Where a group is in its life."""

    GENERATING = "generating"
    """Completions are drawn."""
    SCORING = "scoring"
    """All tokens are there; scores are missing."""
    PUTTING = "putting"
    """Finished; the broker has not answered yet."""


class GivenBack(Exception):
    """The group cannot be finished here and now. An empty `failure` does not count against the prompt."""

    def __init__(self, reason: str, failure: str = "", permanent: bool = False, engine_failed: bool = False):
        super().__init__(reason)
        self.failure, self.permanent, self.engine_failed = failure, permanent, engine_failed


class Group:
    """One leased prompt at work."""

    def __init__(self, lease: broker_pb2.PromptLease, spec: broker_pb2.RunSpec, n: int):
        """`n` is the number of completions it counts for until its prompt has been read."""
        self.lease, self.n = lease, n
        self.stage = Stage.GENERATING
        self._spec = spec

    async def make(
        self, engine: Engine, reader: PromptReader, scorer: Scorer, rollout_id: str
    ) -> experience_pb2.ExperienceGroup:
        """Generate and score. Raises GivenBack."""
        instance = self.lease.instance
        try:
            token_ids, draw = reader.read(instance.prompt, self._spec, instance.purpose)
        except (PromptRefused, PromptError) as error:
            raise _unusable(error) from error
        self.n = draw.n
        scores: dict[int, asyncio.Future[reward_pb2.Score]] = {}
        try:
            finished = await self._generate(engine, reader, scorer, token_ids, draw, scores)
            self.stage = Stage.SCORING
            scored = [
                ScoredCompletion(completion, text, await scores[completion.index] if scores else None)
                for completion, text in finished
            ]
        except ScoringFailed as error:
            raise GivenBack("a completion could not be scored", str(error), error.permanent) from error
        except PromptError as error:
            raise _unusable(error) from error
        except EngineError as error:
            raise GivenBack("the engine failed", f"engine: {error}", engine_failed=True) from error
        finally:
            for score in scores.values():
                _forget(score)
        self._check_versions([completion for completion, _ in finished])
        return build_group(self.lease, token_ids, reader.text(token_ids), scored, draw.settings.temperature, rollout_id)

    async def _generate(
        self,
        engine: Engine,
        reader: PromptReader,
        scorer: Scorer,
        token_ids: np.ndarray,
        draw: Draw,
        scores: dict[int, "asyncio.Future[reward_pb2.Score]"],
    ) -> list[tuple[EngineCompletion, str]]:
        """Return the completions with their texts; each is handed to the scorer as soon as it is done."""
        instance = self.lease.instance
        template = self._score_item(draw.settings.max_new_tokens, reader.text(token_ids))
        tokens = TOKENS.labels(_PURPOSES.get(instance.purpose, "other"))
        finished: list[tuple[EngineCompletion, str]] = []
        async with aclosing(draw_completions(engine, self.lease.lease_id, token_ids, draw)) as stream:
            async for completion in stream:
                text = reader.text(completion.token_ids)
                finished.append((completion, text))
                tokens.inc(completion.token_ids.size)
                COMPLETIONS.labels(completion.finish_reason).inc()
                if template is not None:
                    item = reward_pb2.ScoreItem()
                    item.CopyFrom(template)
                    item.completion = text
                    item.completion_tokens = completion.token_ids.size
                    item.truncated = completion.finish_reason == "length"
                    scores[completion.index] = scorer.submit(item)
                for score in scores.values():
                    # One failure fails the group: the rest need not be generated.
                    if score.done():
                        score.result()
        return finished

    def _score_item(self, max_new_tokens: int, prompt_text: str) -> reward_pb2.ScoreItem | None:
        """Return what all score items of the group share, or None for a serving prompt that asks for no score."""
        prompt = self.lease.instance.prompt
        serving = self.lease.instance.purpose == experience_pb2.PURPOSE_SERVE
        if serving and not prompt.verifiers and not prompt.HasField("reference"):
            return None
        verifiers = prompt.verifiers or self._spec.verifiers
        if not verifiers:
            raise GivenBack("no verifier", "neither the prompt nor the run names a verifier", permanent=True)
        return reward_pb2.ScoreItem(
            reference=prompt.reference,
            verifiers=verifiers,
            max_new_tokens=max_new_tokens,
            run_id=self._spec.run_id,
            prompt=prompt_text,
        )

    def _check_versions(self, completions: list[EngineCompletion]) -> None:
        versions = versions_of(completions)
        instance = self.lease.instance
        if not versions:
            raise GivenBack("no tokens", "the engine generated no token")
        if UNKNOWN_VERSION in versions:
            raise GivenBack("tokens of weights of unknown version")
        if (pinned := pinned_version(instance)) is not None and versions != {pinned}:
            raise GivenBack(f"pinned to version {pinned}, generated by {sorted(versions)}")


def pinned_version(instance: experience_pb2.PromptInstance) -> int | None:
    """Return the policy version that must generate every token, or None for the live one."""
    if instance.HasField("pinned_version") and instance.pinned_version >= 0:
        return instance.pinned_version
    return None


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


def _forget(score: "asyncio.Future[reward_pb2.Score]") -> None:
    """Nobody waits for this score any more: cancel it, or take note of its failure."""
    if not score.cancel() and not score.cancelled():
        score.exception()


def _unusable(error: Exception) -> GivenBack:
    return GivenBack("the prompt cannot be used", f"prompt cannot be used: {error}", permanent=True)
