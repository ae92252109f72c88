"""The interface between the rollout service and an engine.

An engine holds a model, turns prompt tokens into completions, and installs new weights between two token steps. It has
no part in gRPC, broker or rewards. All methods are called from one asyncio event loop and must not block it.

The service calls these in a weight update:

    join_weight_group -> pause -> receive_weights -> [service compares the checksums] -> install_weights -> resume

`receive_weights` fills buffers of its own and changes no parameter, so the model stays as it was when a transfer fails
or its checksum differs (then `leave_weight_group`). It may also run while the engine generates: then only the
installation needs a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import ValidationError

from quartet_common.sampling import Effect, SamplingParameters, altered, refusal
from quartet_rollout.errors import (  # noqa: F401 (part of the interface)
    EngineError,
    ManifestError,
    PromptError,
    WeightInstallError,
    WeightTransferError,
)
from quartet_rollout.weight_sync import WeightGroupInfo

if TYPE_CHECKING:
    from quartet.v1 import rollout_pb2

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]
SleepLevel = Literal[1, 2]

UNKNOWN_VERSION = -1
"""Policy version of weights that no update brought, e.g. those of the model folder."""


class SamplingSettings(SamplingParameters):
    """The validated parameters of quartet_common.sampling.

    Filters apply in the order temperature, min_p, top_k, top_p, and the log-probs an engine returns are those of the
    distribution that remains, renormalized. At temperature 0 (greedy) they are those of the model itself, at
    temperature 1, without filters. Stop strings are searched in the decoded text, special tokens included; the text or
    token that stops a completion stays in it. Completion i of a prompt uses `seed` + i.
    """

    masks: bool = False
    """Return the candidates that the filters left, token by token (`EngineCompletion.mask`)."""
    routed_experts: bool = False
    """Return the experts that each token went to (`EngineCompletion.routed_experts`)."""

    def __init__(self, **values: Any) -> None:
        """Raises PromptError for a value out of range."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            name, came, allowed = refusal(error)
            raise PromptError(f"sampling.{name} is {came}; allowed: {allowed}") from error

    @property
    def masked(self) -> bool:
        """Whether completions get a mask: `masks` is set, and tokens are sampled from less than the vocabulary."""
        return self.masks and self.temperature > 0 and bool(altered(self, Effect.REMOVES))


def check_prompt(prompt_token_ids: np.ndarray | list[int], n: int, max_model_len: int, vocab_size: int) -> list[int]:
    """Return the prompt as a list. Raises PromptError unless a model of this context and vocabulary can serve it."""
    prompt = [int(token) for token in prompt_token_ids]
    if n < 1:
        raise PromptError(f"n is {n}; allowed: at least 1")
    if not prompt:
        raise PromptError("the prompt has no tokens; allowed: at least 1")
    if len(prompt) >= max_model_len:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens; allowed: at most {max_model_len - 1}, as the model's context of "
            f"{max_model_len} must hold the completion too"
        )
    for place, token in enumerate(prompt):
        if not 0 <= token < vocab_size:
            raise PromptError(f"got token id {token}; allowed: 0 to {vocab_size - 1}", place)
    return prompt


@dataclass(frozen=True)
class SamplingMask:
    """The candidates each token of a completion was sampled from, after min_p, top_k and top_p.

    The trainer renormalizes its log-probs over the same candidates, to compare with the distribution that the tokens
    were sampled from instead of that over the whole vocabulary (arXiv:2512.02556).
    """

    counts: np.ndarray
    """int32 [T]: candidates of each token; 0 where nothing was cut off and all of the vocabulary was left."""
    token_ids: np.ndarray
    """int32 [sum of counts]: their ids, ascending for each token, one token after another."""

    @classmethod
    def nothing_cut(cls, tokens: int) -> SamplingMask:
        """The mask of tokens that were sampled from the whole vocabulary."""
        return cls(np.zeros(tokens, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True)
class EngineCompletion:
    """One finished completion."""

    index: int
    """Position in its request, 0 to n-1."""
    token_ids: np.ndarray
    """int32 [T], exactly as sampled, the end of sequence included."""
    log_probs: np.ndarray
    """float32 [T], natural log-prob of each token under the processed distribution it was drawn from."""
    finish_reason: FinishReason
    """"stop": end of sequence, stop string or stop token; "length": a limit; "abort": what there was when aborted."""
    version_spans: tuple[tuple[int, int, int], ...]
    """(policy_version, begin, end): contiguous, in order, covering 0 to T; empty when T is 0."""
    mask: SamplingMask | None = None
    """With `SamplingSettings.masks`, if the settings truncate; else None."""
    routed_experts: np.ndarray | None = None
    """With `SamplingSettings.routed_experts`: uint8, or int32 above 256 experts, [P + T - 1, hidden layers, experts per
    token], of all tokens but the last, as last computed; zeros in layers without a router."""


@dataclass(frozen=True)
class EngineStats:
    """Current load of an engine."""

    running: int
    """Completions being generated."""
    waiting: int
    """Completions that wait for a free slot, or for a pause to end."""
    kv_cache_use: float
    """Fraction of the KV cache in use, 0 to 1; -1 when the engine has no fixed cache."""
    tokens_total: int
    """Tokens generated since the start, those of unfinished and aborted completions included."""
    steps: int = 0
    """Steps since the start, of an engine some of whose steps bring no token, as for a part of a long prompt."""


def version_spans(versions: list[tuple[int, int]], length: int) -> tuple[tuple[int, int, int], ...]:
    """Return (version, begin, end) spans from the (version, first token) of each change. Empty spans are left out, and
    neighbors of the same version joined."""
    spans: list[tuple[int, int, int]] = []
    ends = [begin for _, begin in versions[1:]] + [length]
    for (version, begin), end in zip(versions, ends, strict=False):
        if begin == end:
            continue
        if spans and spans[-1][0] == version:
            begin = spans.pop()[1]
        spans.append((version, begin, end))
    return tuple(spans)


async def side_by_side(
    completions: Iterable[Coroutine[Any, Any, EngineCompletion]],
) -> AsyncGenerator[EngineCompletion, None]:
    """Run completions concurrently; yield each as it finishes. Closing this, or an error in one, cancels the others."""
    tasks = [asyncio.create_task(completion) for completion in completions]
    try:
        for finished in asyncio.as_completed(tasks):
            yield await finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@runtime_checkable
class GivesLogProbs(Protocol):
    """What an engine with the capability "log_probs" has besides."""

    async def log_probs(self, request_id: str, token_ids: list[int], begin: int) -> np.ndarray:
        """Return the log-prob of each token from `begin` on, after all before it: float32, at temperature 1, over the
        whole vocabulary. Waits during a pause.

        Raises PromptError for ids outside the vocabulary, or more tokens than `max_model_len` - 1; EngineError.
        """


@runtime_checkable
class Engine(Protocol):
    """A generating engine. Register one with `quartet_rollout.engines.registry`; the contract tests apply to each."""

    @property
    def name(self) -> str:
        """Its name in the configuration, e.g. "vllm"."""

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, prompt and completion together. Known after `start`."""

    @property
    def policy_version(self) -> int:
        """Policy version of the installed weights; -1: unknown. An engine with unknown weights still generates, with
        -1 in the version spans; the service does not ask it to."""

    @property
    def failure(self) -> str:
        """Why the engine can no longer generate and must be replaced; "" while it can, as in `WeightGroupMixin`."""

    @property
    def weight_ranks(self) -> int:
        """How many ranks of a weight group this engine takes (its tensor-parallel size), from `WeightGroupInfo.rank`
        on."""

    def tokenizer(self) -> Any:
        """The model's `transformers` tokenizer, for chat template, encoding and decoding."""

    async def start(self) -> None:
        """Load the model. Raises EngineError."""

    async def close(self) -> None:
        """Free everything; unfinished completions end as "abort". Safe to call twice, and after a failed start."""

    def generate(
        self, request_id: str, prompt_token_ids: np.ndarray | list[int], n: int, sampling: SamplingSettings
    ) -> AsyncGenerator[EngineCompletion, None]:
        """Sample `n` completions of one prompt and yield each as it finishes, in that order, not by index.

        `request_id` is for the engine's log. While the engine is paused the request waits. Closing the iterator early
        (or cancelling the task that reads it) aborts the completions that have not finished.

        Raises PromptError, at the first `anext`, for a prompt that is empty, holds ids outside the vocabulary, or
        leaves no room for one token in `max_model_len`; EngineError when the engine has failed.
        """

    async def pause(self, mode: PauseMode, keep_kv_cache: bool = False) -> None:
        """Stop between two token steps.

        "keep": they stop where they are and continue after `resume`. "wait": they finish first. "abort": they end with
        finish reason "abort". Cancelling the call resumes. `keep_kv_cache` is for an installation during this pause:
        True lets running completions continue with the keys and values of the old weights (faster, but inexact), False
        recomputes these. Pausing twice is allowed: the later `keep_kv_cache` counts.
        """

    async def resume(self) -> None:
        """End a pause. Does nothing without one."""

    async def sleep(self, level: SleepLevel = 1) -> None:
        """Free the accelerator's memory until `wake`; running completions and new requests wait. May be repeated.

        Level 1: the weights move to host memory; keys and values are discarded, and recomputed after `wake`. Level 2:
        the weights are discarded too, and after `wake` `policy_version` is -1 until weights are installed.

        Raises EngineError without "sleep" among `capabilities`.
        """

    async def wake(self) -> None:
        """Allocate the memory again and continue, unless there is a pause. Does nothing when awake."""

    def stats(self) -> EngineStats:
        """Current load; never blocks, may be one token step old."""

    def capabilities(self) -> list[str]:
        """Capabilities for the handshake, e.g. "weights.gloo", "weights.full", "weights.in_flight"; "sampling_masks"
        and "routed_experts" if `SamplingSettings.masks` and `.routed_experts` are supported, "sleep" if `sleep` is,
        "log_probs" with `GivesLogProbs`. Known after `start`."""

    def check_manifest(self, manifest: rollout_pb2.WeightManifest) -> None:
        """Raises ManifestError, naming the tensor, unless these weights fit the model. Quick; no side effects."""

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        """Leave any process group and join that of an epoch. Returns when all ranks have met; run it as a task, to
        answer the trainer meanwhile. Raises WeightTransferError at the deadline or if the store cannot be reached,
        EngineError for a transport that is not among `capabilities`."""

    async def leave_weight_group(self) -> None:
        """Leave the group, if in one: abort a transfer in progress and discard what was received."""

    async def receive_weights(
        self, manifest: rollout_pb2.WeightManifest, timeout_seconds: float, path: str = ""
    ) -> list[int]:
        """Receive every bucket into buffers. Returns running checksums: for each bucket, that of all bytes up to its
        end. Installs nothing.

        `path`: with the file transport, the folder of this version's files.

        Raises ManifestError before anything is received; WeightTransferError at the deadline or when the sender is
        gone, after leaving the group. Never waits longer than `timeout_seconds`.
        """

    async def install_weights(self, policy_version: int) -> None:
        """Install what `receive_weights` received, during a pause, as this policy version. Tokens sampled afterwards
        belong to it. Raises EngineError when nothing was received, WeightInstallError."""

    async def set_version(self, policy_version: int) -> None:
        """Declare the current weights, e.g. those of the model folder, to be this policy version; -1: unknown. Tokens
        sampled afterwards belong to it."""
