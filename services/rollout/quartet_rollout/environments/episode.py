"""Completions of several turns: the policy's turn, the environment's answer, the policy's next turn, ...

The first turns of a group are one request to the engine; each later turn is a request of its own. Its prompt is the
token ids of all that is before it, as sampled and inserted.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from quartet.v1 import experience_pb2

from quartet_common.durations import to_seconds
from quartet_common.log import get_logger
from quartet_common.text import error_text
from quartet_common.values import LARGEST_FLOAT32
from quartet_rollout.engines.base import Engine, EngineCompletion, FinishReason, SamplingSettings
from quartet_rollout.environments.base import Answer, EnvironmentFailed, Episode, Start, Tools, Turn
from quartet_rollout.environments.conversation import AnswerWriter, Conversation, PlayedCompletion
from quartet_rollout.environments.registry import Chosen
from quartet_rollout.generation import GenerationRequest, generate_completions
from quartet_rollout.metrics import ENVIRONMENT_SECONDS, ENVIRONMENT_TIMEOUTS, TURNS
from quartet_rollout.prompts import PromptReader

log = get_logger(__name__)

_CLOSE_SECONDS = 5.0
_CANCEL_SECONDS = 1.0
TURN_SEEDS = 1 << 32
"""Difference between the seeds of consecutive turns: far above any group size."""


@dataclass(frozen=True)
class EpisodeContext:
    """Shared by the completions of one prompt."""

    engine: Engine
    request_id: str
    prompt: experience_pb2.Prompt
    prompt_token_ids: np.ndarray
    """int32 [P]."""
    request: GenerationRequest
    """Its `max_new_tokens` limits a whole completion, answers included."""
    chosen: Chosen
    reader: PromptReader
    writer: AnswerWriter
    tools: Tools
    run_id: str

    def turn_settings(self, room: int, number: int, index: int) -> SamplingSettings:
        """Return the sampling of turn `number` of completion `index`, which has `room` tokens left."""
        settings, chosen = self.request.settings, self.chosen
        seed = settings.seed
        if seed is not None and number:
            seed = (seed + index + number * TURN_SEEDS) % 2**63
        changes = {
            "max_new_tokens": min(room, chosen.spec.max_turn_tokens or room),
            "stop": tuple(dict.fromkeys([*settings.stop, *chosen.environment.stop(chosen.parameters)])),
            "seed": seed,
        }
        return settings.model_copy(update=changes)


async def run_episode(context: EpisodeContext) -> AsyncGenerator[PlayedCompletion, None]:
    """Yield the completions of a prompt as they finish.

    Raises:
        EnvironmentFailed: an environment failed; the other completions are cancelled.
        EngineError: from the engine.
    """
    finished: asyncio.Queue[PlayedCompletion | None] = asyncio.Queue()
    settings = context.turn_settings(context.request.settings.max_new_tokens, 0, 0)

    async def run_all() -> None:
        try:
            async with (
                asyncio.TaskGroup() as group,
                aclosing(
                    generate_completions(
                        context.engine,
                        context.request_id,
                        context.prompt_token_ids,
                        GenerationRequest(context.request.n, settings),
                    )
                ) as stream,
            ):
                async for first in stream:
                    group.create_task(_run_one(context, first, finished))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            finished.put_nowait(None)

    running = asyncio.create_task(run_all(), name=f"environment {context.request_id}")
    try:
        while (completion := await finished.get()) is not None:
            yield completion
        await running
    finally:
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # marks it as retrieved


async def _run_one(context: EpisodeContext, first: EngineCompletion, finished: asyncio.Queue) -> None:
    conversation = Conversation(context.prompt_token_ids)
    episode = _begin(context, first.index)
    try:
        reason = await _converse(context, conversation, episode, first)
    except asyncio.CancelledError as error:
        if _is_from_outside():
            raise
        raise _raised(context, error) from error
    finally:
        await _close(episode)
    TURNS.inc(conversation.turns)
    finished.put_nowait(conversation.completed(first.index, reason))


async def _converse(
    context: EpisodeContext, conversation: Conversation, episode: Episode, first: EngineCompletion
) -> FinishReason:
    """Alternate turns and answers until the completion ends; return its finish reason."""
    chosen, turn = context.chosen, first
    chat = context.prompt.chat if context.prompt.HasField("chat") else None
    while True:
        conversation.add_turn(turn)
        if turn.finish_reason != "stop" or conversation.turns >= chosen.spec.max_turns or not turn.token_ids.size:
            return turn.finish_reason
        answer = await _answer(context, conversation, episode, turn)
        if answer is not None and answer.reward is not None:
            conversation.reward_turn(answer.reward)
        if answer is None or answer.ends:
            return "stop"
        room = context.request.settings.max_new_tokens - conversation.size
        tokens = context.writer.write(answer, chat, int(turn.token_ids[-1]), room, chosen.spec.max_answer_tokens)
        if tokens is None:
            return "length"
        conversation.insert(tokens)
        turn = await _next_turn(context, conversation, first.index)


async def _next_turn(context: EpisodeContext, conversation: Conversation, index: int) -> EngineCompletion:
    number = conversation.turns
    room = context.request.settings.max_new_tokens - conversation.size
    request = GenerationRequest(1, context.turn_settings(room, number, index))
    request_id = f"{context.request_id}/{index}/turn-{number}"
    async with aclosing(generate_completions(context.engine, request_id, conversation.token_ids, request)) as stream:
        return await anext(stream)


def _begin(context: EpisodeContext, index: int) -> Episode:
    start = Start(
        prompt=context.prompt,
        prompt_text=context.reader.text(context.prompt_token_ids),
        prompt_token_ids=context.prompt_token_ids,
        index=index,
        run_id=context.run_id,
    )
    try:
        return context.chosen.environment.begin(start, context.chosen.parameters, context.tools)
    except EnvironmentFailed:
        raise
    except Exception as error:  # an environment may raise anything
        raise _raised(context, error) from error


async def _answer(
    context: EpisodeContext, conversation: Conversation, episode: Episode, turn: EngineCompletion
) -> Answer | None:
    deadline = to_seconds(context.chosen.spec.answer_deadline)
    completion = conversation.completion_token_ids
    text = context.reader.text(context.writer.spoken(turn.token_ids))
    asked = Turn(
        number=conversation.turns - 1,
        text=text,
        token_ids=turn.token_ids,
        stop=_stop_of(text, context.turn_settings(1, 0, 0).stop),
        completion_text=context.reader.text(completion),
        completion_token_ids=completion,
    )
    try:
        with ENVIRONMENT_SECONDS.labels(context.chosen.environment.name).time():
            answer = await _within(deadline, episode.answer(asked))
    except EnvironmentFailed:
        raise
    except DeadlinePassed as error:
        message = f"no answer to turn {asked.number} within {deadline:g} s"
        name = context.chosen.environment.name
        ENVIRONMENT_TIMEOUTS.labels(name).inc()
        log.warning("environment %s: no answer to turn %d within %g s", name, asked.number, deadline)
        raise EnvironmentFailed(message, counted=not context.tools.away) from error
    except Exception as error:
        raise _raised(context, error) from error
    if answer is not None and not isinstance(answer, Answer):
        raise EnvironmentFailed(f"it answered {type(answer).__name__}; allowed: Answer or None", permanent=True)
    reward = None if answer is None else answer.reward
    if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= LARGEST_FLOAT32):
        raise EnvironmentFailed(f"its reward of a turn is {reward!r}; allowed: a finite number", permanent=True)
    return answer


class DeadlinePassed(Exception):
    """An environment did not do in time what it was asked to."""


async def _within(seconds: float, work: Awaitable[Any]) -> Any:
    """Await `work`; at the deadline, or when the caller is cancelled, cancel it. If it ignores that, it is left behind:
    an environment of another package cannot hold the group, nor the rollout's end, up. Raises DeadlinePassed."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise DeadlinePassed(f"not within {seconds:g} s")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)


def _raised(context: EpisodeContext, error: BaseException) -> EnvironmentFailed:
    """Log an exception and return it as a permanent failure: with retries, only conversations that do not crash the
    environment would be trained on."""
    log.warning("environment %s raised", context.chosen.environment.name, exc_info=error)
    return EnvironmentFailed(f"it raised {error_text(error)}", permanent=True)


def _stop_of(text: str, stops: tuple[str, ...]) -> str:
    """Return the stop string that ended a turn, the one that ends first; "" if there is none."""
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else ""


async def _close(episode: Episode) -> None:
    """Close an episode. An exception is only logged: the completion remains valid."""
    try:
        await _within(_CLOSE_SECONDS, episode.close())
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and _is_from_outside():
            raise
        log.exception("an environment's episode could not be closed")


def _is_from_outside() -> bool:
    """Return whether the current task was cancelled. An environment may raise CancelledError by itself; a TaskGroup
    would drop its completion without an error."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
