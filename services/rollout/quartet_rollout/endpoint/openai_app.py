"""vLLM's OpenAI server as an application over the engine, and the recording of what it samples."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

from quartet_rollout.agents.episodes import CALLER, AgentEpisode, Call
from quartet_rollout.agents.rows import as_sampled
from quartet_rollout.config import HttpSection
from quartet_rollout.engines.base import EngineError
from quartet_rollout.engines.vllm_engine.worker import KEY

if TYPE_CHECKING:
    from quartet_rollout.engines.vllm_engine.engine import VllmEngine

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "logit_bias",
    "bad_words",
)
"""Sampling of an episode's calls that must be the episode's: the trainer recomputes log-probs under it."""
_NONE = ("structured_outputs", "allowed_token_ids", "thinking_token_budget", "repetition_detection", "extra_args")
"""What an episode's calls cannot ask for: the trainer cannot recompute log-probs under it."""


async def openai_app(engine: VllmEngine, model_path: str, http: HttpSection) -> Any:
    """Return vLLM's OpenAI server as an ASGI application over the engine. A request runs in the context of its caller
    (`CALLER`); those of an episode are recorded. Raises EngineError for options that vLLM refuses."""
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([])
    args.model = model_path
    for name, value in {
        "enable_scale_out": True,  # /inference/v1/generate
        "return_tokens_as_token_ids": True,
        "disable_fastapi_docs": True,
        "served_model_name": [http.model],
        "enable_auto_tool_choice": bool(http.tool_call_parser),
        "tool_call_parser": http.tool_call_parser or None,
        "reasoning_parser": http.reasoning_parser,
    }.items():
        setattr(args, name, value)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError, KeyError) as error:
        raise EngineError(f"rollout.http: {error}") from error
    args.structured_outputs_config.reasoning_parser = http.reasoning_parser
    client = PolicyClient(engine, http.max_tokens)
    tasks = await engine.llm.get_supported_tasks()
    root = logging.getLogger()
    level = root.level
    try:
        # In a thread: it takes a second, in which the service would not answer.
        app = await asyncio.to_thread(build_app, args, tasks, engine.llm.model_config)
    finally:
        # vllm/entrypoints/serve/sagemaker/api_router.py:attach_router imports a package that sets the root logger's
        # level to ERROR, and restores only the levels of its handlers.
        root.setLevel(level)
    app.state.server = SimpleNamespace()  # vLLM stops it when its engine has failed; the rollout then ends by itself
    await init_app_state(client, app.state, args, tasks)  # type: ignore[arg-type]
    return app


class PolicyClient:
    """What vLLM's server takes for its engine: `AsyncLLM`, whose requests wait for the end of a pause, are bounded, and
    are recorded if they are an episode's."""

    def __init__(self, engine: VllmEngine, most: int):
        self._engine, self._most = engine, most
        self._tokenizer = engine.tokenizer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.llm, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.generate. Raises VLLMValidationError, before the first output, for what an episode does not
        allow."""
        episode = CALLER.get().episode
        most = self._most if episode is None else min(self._most, episode.settings.max_new_tokens)
        sampling_params.max_tokens = min(sampling_params.max_tokens or most, most)
        if KEY in (sampling_params.extra_args or ()):
            raise VLLMValidationError(f"{KEY} is the rollout's own; allowed: unset", parameter=KEY)
        if episode is None:
            return self._engine.sample(prompt, sampling_params, request_id, **options)
        _check(sampling_params, episode)
        if episode.begun >= episode.max_calls:
            raise VLLMValidationError(f"this episode has had its {episode.max_calls} calls (environment.max_turns)")
        if prompt.get("type") != "token":
            raise VLLMValidationError("an episode's prompts are text; images and embeddings cannot be trained on")
        episode.begun += 1
        return self._recorded(episode, prompt, sampling_params, request_id, options)

    async def _recorded(
        self, episode: AgentEpisode, prompt: Any, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        if params.logprobs is None:
            params.logprobs = 0  # only that of the sampled token
        if episode.settings.masked:
            params.extra_args = {KEY: request_id}
        tokens: list[int] = []
        log_probs: list[float] = []
        answer, ended = "", False
        try:
            question = self._text(prompt["prompt_token_ids"])
            prompt = {**prompt, "prompt_token_ids": as_sampled(prompt["prompt_token_ids"], episode.calls, self._text)}
            async with aclosing(self._engine.sample(prompt, params, request_id, **options)) as outputs:
                async for output in outputs:
                    (one,) = output.outputs
                    if params.output_kind is not RequestOutputKind.DELTA:
                        tokens, log_probs, answer = [], [], ""
                    tokens += one.token_ids
                    log_probs += _log_probs(one)
                    answer += one.text
                    if output.finished:
                        mask = request_id if episode.settings.masked else ""
                        turn = await self._engine.turn(one, tokens, log_probs, mask)
                        read = np.asarray(prompt["prompt_token_ids"], np.int32)
                        # Before the last output is sent: with it the agent may go on.
                        _finished(episode, Call(read, turn, question, answer, CALLER.get().session))
                        ended = True
                    yield output
        except (VLLMClientError, ValueError, OverflowError):
            if not tokens:  # vLLM refused it: the call has not begun
                episode.begun -= 1
                ended = True
            raise
        finally:
            if not ended:
                episode.broken_off()

    def _text(self, token_ids: Any) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _finished(episode: AgentEpisode, call: Call) -> None:
    turn = call.turn
    if turn.log_probs.size != turn.token_ids.size or not np.isfinite(turn.log_probs).all():
        episode.trouble = episode.trouble or "the engine gave no finite log-prob for each token of a call"
    episode.finished(call)


def _log_probs(output: CompletionOutput) -> list[float]:
    """Return the log-prob of each token of an output, NaN where there is none."""
    given = output.logprobs or ()
    return [at[token].logprob if token in at else math.nan for token, at in zip(output.token_ids, given, strict=False)]


def _check(params: SamplingParams, episode: AgentEpisode) -> None:
    """Raises VLLMValidationError for sampling under which the trainer could not recompute the log-probs."""
    if params.n != 1:
        raise VLLMValidationError(f"n is {params.n}; allowed in an episode: 1", parameter="n")
    for name in _SAME:
        came, own = _plain(getattr(params, name)), _plain(getattr(episode.settings, name))
        if came != own:
            raise VLLMValidationError(
                f"{name} is {came}; allowed in an episode: {own}, the run's, or unset", parameter=name
            )
    for name in _NONE:
        if getattr(params, name, None):
            raise VLLMValidationError(f"{name} is set; allowed in an episode: unset", parameter=name)


def _plain(value: Any) -> Any:
    """A parameter's value in one form for all its ways to say "none"."""
    if value in (None, -1, [], (), {}):
        return 0
    return list(value) if isinstance(value, tuple) else value
