"""The life of one prompt group: prompt -> completions -> scores -> experience.

    state        what ends it well        what ends it otherwise
    GENERATING   all completions done     prompt refused, engine or environment failed, pinned version gone, lease lost
    SCORING      all scores there         verifier failed, lease lost
    PUTTING      the broker's outcome     refused, lease lost

A group whose verifier failed is set aside with its completions; its next delivery begins with SCORING. Completions are
never drawn again because of what a verifier does: those it can judge are others than those that the policy writes.

However it ends, its lease is settled exactly once: by the put, by giving it back, or by the broker that took it away.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from enum import Enum

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2

from quartet_common import tracing
from quartet_rollout.engines.base import UNKNOWN_VERSION, Engine, EngineCompletion, EngineError, PromptError
from quartet_rollout.environments.base import EnvironmentFailed
from quartet_rollout.environments.conversation import PlayedCompletion, inserted_tokens
from quartet_rollout.environments.episode import EpisodeContext, run_episode
from quartet_rollout.environments.registry import Chosen, Environments, UnknownEnvironment
from quartet_rollout.experience import DrawnGroup, Timings, drawn_group, versions_of
from quartet_rollout.generation import GenerationRequest, PromptRefused, generate_completions, scheduled
from quartet_rollout.metrics import COMPLETIONS, TOKENS
from quartet_rollout.prompts import PromptReader
from quartet_rollout.scoring import Scorer, ScoringFailed

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


class LeaseReleased(Exception):
    """The group cannot be finished here and now. An empty `failure` does not count against the prompt.

    `unscored`: a serialized UnscoredGroup, of a group that no verifier could score.
    """

    def __init__(
        self,
        reason: str,
        failure: str = "",
        permanent: bool = False,
        engine_failed: bool = False,
        unscored: bytes = b"",
    ):
        super().__init__(reason)
        self.failure, self.permanent, self.engine_failed = failure, permanent, engine_failed
        self.unscored = unscored


class Group:
    """One leased prompt at work."""

    def __init__(self, lease: broker_pb2.PromptLease, spec: broker_pb2.RunSpec, n: int):
        """`n` is the number of completions it counts for until its prompt has been read."""
        self.lease, self.n = lease, n
        self.stage = Stage.GENERATING
        self.generated = 0
        """Completions that the engine has finished."""
        self.on_generated: Callable[[], None] = lambda: None
        """Called when it has finished all of them."""
        self.traceparent = ""
        """Context of the span that traces it; "" if it is not traced."""
        self._spec = spec

    async def make(
        self, engine: Engine, reader: PromptReader, scorer: Scorer, environments: Environments, rollout_id: str
    ) -> experience_pb2.ExperienceGroup:
        """Generate and score. Raises LeaseReleased."""
        scores: dict[int, asyncio.Future[reward_pb2.Score]] = {}
        try:
            drawn = await self._draw(engine, reader, scorer, environments, rollout_id, scores)
            return await self._finish(drawn, [scores[index] for index in sorted(scores)])
        finally:
            for score in scores.values():
                _forget(score)

    async def score_again(self, unscored: bytes, scorer: Scorer) -> experience_pb2.ExperienceGroup:
        """Score completions of an earlier delivery. Raises LeaseReleased."""
        drawn = DrawnGroup.of_unscored(unscored, self.lease.attempt)
        for item in drawn.items:
            item.traceparent = self.traceparent
        scores = [scorer.submit(item) for item in drawn.items]
        try:
            return await self._finish(drawn, scores)
        finally:
            for score in scores:
                _forget(score)

    async def _finish(
        self, drawn: DrawnGroup, scores: "list[asyncio.Future[reward_pb2.Score]]"
    ) -> experience_pb2.ExperienceGroup:
        if scores:
            with tracing.span("await scores"):
                await asyncio.wait(scores)
        try:
            return drawn.scored([score.result() for score in scores])
        except ScoringFailed as error:
            unscored = b"" if error.permanent else drawn.unscored([_found(score) for score in scores])
            raise _not_scored(error, unscored) from error

    async def _draw(
        self,
        engine: Engine,
        reader: PromptReader,
        scorer: Scorer,
        environments: Environments,
        rollout_id: str,
        scores: dict[int, "asyncio.Future[reward_pb2.Score]"],
    ) -> DrawnGroup:
        """Generate; `scores` gets the score of each completion as it is asked for. Raises LeaseReleased."""
        instance = self.lease.instance
        try:
            token_ids, draw = await reader.read_in_turn(instance.prompt, self._spec, instance.purpose)
            draw = scheduled(draw, instance, self._spec, engine.policy_version)
            _check_temperature(instance, draw)
            chosen = environments.choose(instance.prompt, self._spec)
        except (PromptRefused, PromptError) as error:
            raise _unusable(error) from error
        except UnknownEnvironment as error:
            raise LeaseReleased("an environment that is not here", str(error)) from error
        self.n = draw.n
        timings = Timings()
        items: dict[int, reward_pb2.ScoreItem] = {}
        try:
            stream = (
                generate_completions(engine, self.lease.lease_id, token_ids, draw)
                if chosen is None
                else run_episode(self._episode_context(engine, reader, environments, token_ids, draw, chosen))
            )
            last_turn = chosen is not None and chosen.scores_last_turn
            with tracing.span("generate") as span:
                finished = await self._score_all(
                    stream, reader, scorer, token_ids, draw, items, scores, timings, last_turn
                )
                span.attributes.update(_generated([completion for completion, _ in finished]))
        except ScoringFailed as error:
            raise _not_scored(error) from error
        except PromptError as error:
            raise _unusable(error) from error
        except EnvironmentFailed as error:
            failure = f"environment: {error}" if error.counted else ""
            raise LeaseReleased(f"the environment failed: {error}", failure, error.permanent) from error
        except EngineError as error:
            raise LeaseReleased("the engine failed", f"engine: {error}", engine_failed=True) from error
        self.stage = Stage.SCORING
        self.on_generated()
        self._check_versions([completion for completion, _ in finished])
        if instance.purpose == experience_pb2.PURPOSE_TRAIN:
            _check_log_probs([completion for completion, _ in finished])
        text = reader.text(token_ids)
        return drawn_group(self.lease, token_ids, text, finished, items, draw.settings, rollout_id, timings)

    def _episode_context(
        self,
        engine: Engine,
        reader: PromptReader,
        environments: Environments,
        token_ids: np.ndarray,
        draw: GenerationRequest,
        chosen: Chosen,
    ) -> EpisodeContext:
        assert environments.writer is not None  # there is a reader
        return EpisodeContext(
            engine=engine,
            request_id=self.lease.lease_id,
            prompt=self.lease.instance.prompt,
            prompt_token_ids=token_ids,
            draw=draw,
            chosen=chosen,
            reader=reader,
            writer=environments.writer,
            tools=environments.tools,
            run_id=self._spec.run_id,
        )

    async def _score_all(
        self,
        stream: AsyncGenerator[EngineCompletion, None],
        reader: PromptReader,
        scorer: Scorer,
        token_ids: np.ndarray,
        draw: GenerationRequest,
        items: dict[int, reward_pb2.ScoreItem],
        scores: dict[int, "asyncio.Future[reward_pb2.Score]"],
        timings: Timings,
        last_turn: bool,
    ) -> list[tuple[EngineCompletion, str]]:
        """Return the completions with their texts; each is handed to the scorer as soon as it is done.

        Raises ScoringFailed for what no verifier can ever score. Other failures wait for the last completion.
        """
        instance = self.lease.instance
        template = self._score_item(draw.settings.max_new_tokens, reader.text(token_ids))
        tokens = TOKENS.labels(_PURPOSES.get(instance.purpose, "other"))
        finished: list[tuple[EngineCompletion, str]] = []
        async with aclosing(stream):
            async for completion in stream:
                self.generated += 1
                timings.generated(completion.index)
                text = reader.text(completion.token_ids)
                finished.append((completion, text))
                tokens.inc(completion.token_ids.size - inserted_tokens(completion))
                COMPLETIONS.labels(completion.finish_reason).inc()
                if template is not None:
                    item = items[completion.index] = reward_pb2.ScoreItem()
                    item.CopyFrom(template)
                    item.completion = _last_turn(completion, reader) if last_turn else text
                    item.completion_tokens = completion.token_ids.size
                    item.truncated = completion.finish_reason == "length"
                    scores[completion.index] = scorer.submit(item)
                    timings.score_awaited(completion.index, scores[completion.index])
                for score in scores.values():
                    if score.done() and isinstance(error := score.exception(), ScoringFailed) and error.permanent:
                        raise error  # the rest need not be generated
        return finished

    def _score_item(self, max_new_tokens: int, prompt_text: str) -> reward_pb2.ScoreItem | None:
        """Return what all score items of the group share, or None for a serving prompt that asks for no score."""
        prompt = self.lease.instance.prompt
        serving = self.lease.instance.purpose == experience_pb2.PURPOSE_SERVE
        if serving and not prompt.verifiers and not prompt.HasField("reference"):
            return None
        verifiers = prompt.verifiers or self._spec.verifiers
        if not verifiers:
            raise LeaseReleased("no verifier", "neither the prompt nor the run names a verifier", permanent=True)
        return reward_pb2.ScoreItem(
            reference=prompt.reference,
            verifiers=verifiers,
            max_new_tokens=max_new_tokens,
            run_id=self._spec.run_id,
            prompt=prompt_text,
            traceparent=self.traceparent,
            columns=prompt.columns,
            messages=_as_json(prompt.chat) if prompt.HasField("chat") else "",
        )

    def _check_versions(self, completions: list[EngineCompletion]) -> None:
        versions = versions_of(completions)
        instance = self.lease.instance
        if not versions:
            raise LeaseReleased("no tokens", "the engine generated no token")
        if UNKNOWN_VERSION in versions:
            raise LeaseReleased("tokens of weights of unknown version")
        if (pinned := pinned_version(instance)) is not None and versions != {pinned}:
            raise LeaseReleased(f"pinned to version {pinned}, generated by {sorted(versions)}")


def _as_json(chat: experience_pb2.Chat) -> str:
    turns = [{"role": message.role, "content": message.content} for message in chat.messages]
    return json.dumps(turns, ensure_ascii=False)


def _check_temperature(instance: experience_pb2.PromptInstance, draw: GenerationRequest) -> None:
    """Raise PromptRefused for a training prompt that no trainer can train on: its batch would fail as a whole."""
    if instance.purpose == experience_pb2.PURPOSE_TRAIN and not draw.settings.temperature > 0:
        raise PromptRefused(
            "sampling.temperature", draw.settings.temperature, "above 0, or another purpose than training"
        )


def _check_log_probs(completions: list[EngineCompletion]) -> None:
    if not all(np.isfinite(completion.log_probs).all() for completion in completions):
        raise LeaseReleased("log-probs that are not finite", "the engine gave log-probs that are not finite")


def pinned_version(instance: experience_pb2.PromptInstance) -> int | None:
    """Return the policy version that must generate every token, or None for the live one."""
    if instance.HasField("pinned_version") and instance.pinned_version >= 0:
        return instance.pinned_version
    return None


def _generated(completions: list[EngineCompletion]) -> dict[str, tracing.Value]:
    """Return what a trace tells of them."""
    versions = versions_of(completions) or {UNKNOWN_VERSION}
    return {
        "quartet.completions": len(completions),
        "quartet.tokens": sum(completion.token_ids.size for completion in completions),
        "quartet.policy_version.oldest": min(versions),
        "quartet.policy_version.newest": max(versions),
    }


def _last_turn(completion: EngineCompletion, reader: PromptReader) -> str:
    assert isinstance(completion, PlayedCompletion)
    begin, end = completion.last_turn
    return reader.text(completion.token_ids[begin:end])


def _forget(score: "asyncio.Future[reward_pb2.Score]") -> None:
    """Nobody waits for this score any more: cancel it, or take note of its failure."""
    if not score.cancel() and not score.cancelled():
        score.exception()


def _found(score: "asyncio.Future[reward_pb2.Score]") -> reward_pb2.Score | None:
    return score.result() if score.exception() is None else None


def _not_scored(error: ScoringFailed, unscored: bytes = b"") -> LeaseReleased:
    return LeaseReleased("a completion could not be scored", str(error), permanent=True, unscored=unscored)


def _unusable(error: Exception) -> LeaseReleased:
    return LeaseReleased("the prompt cannot be used", f"prompt cannot be used: {error}", permanent=True)
