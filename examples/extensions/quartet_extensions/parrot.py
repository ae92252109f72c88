"""An engine that repeats the prompt, token by token. The policy is deterministic, so every log-prob is 0.

It implements everything that an engine must: several completions per prompt, length limits, aborts, pauses between two
tokens, policy versions. It receives weights, checks and counts them, but does not use them.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from pydantic import Field

from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    EngineCompletion,
    EngineError,
    EngineStats,
    SamplingSettings,
    check_prompt,
)
from quartet_rollout.engines.registry import EngineParameters
from quartet_rollout.engines.weight_group import WeightGroupMixin


class ParrotParameters(EngineParameters):
    """The keys of `[rollout.engine_parameters]`."""

    seconds_per_token: float = Field(0.0, ge=0, description="Time to generate a token.")


class Parrot:
    """The engine's factory, which the entry point names."""

    name = "parrot"
    description = "Repeats the prompt."
    parameters = ParrotParameters

    def create(self, model_path: str, parameters: ParrotParameters) -> "ParrotEngine":
        """Return the engine, which loads nothing before `start`."""
        return ParrotEngine(model_path, parameters)


class ParrotEngine(WeightGroupMixin):
    """Implements `quartet_rollout.engines.Engine`; `WeightGroupMixin` has the group, the transfer and its checksum."""

    name = "parrot"
    weight_ranks = 1

    def __init__(self, model_path: str, parameters: ParrotParameters):
        super().__init__(model_path)
        self.max_model_len = parameters.max_model_len or 512
        self.policy_version = UNKNOWN_VERSION
        self.installed = 0
        """Tensors of the last update."""
        self._seconds = parameters.seconds_per_token
        self._tokenizer: Any = None
        self._resumed = asyncio.Event()
        self._aborted: dict[str, asyncio.Event] = {}
        self._running = self._generated = 0

    async def start(self) -> None:
        """Read the model's names, shapes and tokenizer."""
        from quartet_rollout.engines.model_folder import check_model_folder, load_tokenizer

        check_model_folder(self._model_path)
        await self.load_spec()
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._model_path)
        self._resumed.set()

    async def close(self) -> None:
        """Abort all requests."""
        await self.leave_weight_group()
        for request_id in list(self._aborted):
            await self.abort(request_id)

    def tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self._tokenizer

    async def generate(
        self, request_id: str, prompt_token_ids: np.ndarray | list[int], n: int, sampling: SamplingSettings
    ) -> AsyncGenerator[EngineCompletion, None]:
        """Yield completions: the prompt, up to the length limits."""
        prompt = check_prompt(prompt_token_ids, n, self.max_model_len, len(self._tokenizer))
        room = min(sampling.max_new_tokens, self.max_model_len - len(prompt))
        aborted = self._aborted[request_id] = asyncio.Event()
        try:
            for index in range(n):
                yield await self._repeat(index, prompt[:room], len(prompt) > room, aborted)
        finally:
            del self._aborted[request_id]

    async def _repeat(self, index: int, tokens: list[int], cut: bool, aborted: asyncio.Event) -> EngineCompletion:
        versions: list[int] = []
        self._running += 1
        try:
            for _ in tokens:
                if not self._resumed.is_set():
                    waits = {asyncio.create_task(event.wait()) for event in (self._resumed, aborted)}
                    _, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for wait in left:
                        wait.cancel()
                if aborted.is_set():
                    break
                versions.append(self.policy_version)
                self._generated += 1
                await asyncio.sleep(self._seconds)
        finally:
            self._running -= 1
        count = len(versions)
        reason = "abort" if count < len(tokens) else "length" if cut else "stop"
        return EngineCompletion(
            index, np.asarray(tokens[:count], np.int32), np.zeros(count, np.float32), reason, spans(versions)
        )

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens generated so far."""
        if request_id in self._aborted:
            self._aborted[request_id].set()

    async def pause(self, mode: str, keep_kv_cache: bool = False) -> int:
        """Stop generating between two tokens; return the number of running completions."""
        running = self._running
        if mode == "abort":
            for request_id in list(self._aborted):
                await self.abort(request_id)
        if mode != "wait":
            self._resumed.clear()
            return running
        while self._running:
            await asyncio.sleep(self._seconds or 0.001)
        self._resumed.clear()
        return running

    async def resume(self) -> None:
        """Continue generating."""
        self._resumed.set()

    async def sleep(self, level: int = 1) -> None:
        """Raise EngineError: it uses no GPU memory that it could free."""
        raise EngineError("a parrot cannot sleep: it holds no memory of a GPU")

    async def wake(self) -> None:
        """Do nothing: it never sleeps."""

    def stats(self) -> EngineStats:
        """Return running completions and generated tokens; there is no queue and no cache."""
        return EngineStats(self._running, 0, -1.0, self._generated)

    def capabilities(self) -> list[str]:
        """Return those of receiving weights, by all transports of this process."""
        return self.weight_capabilities()

    async def install_weights(self, policy_version: int) -> None:
        """Count the received tensors."""
        self.installed = sum(1 for _ in self.received_tensors())
        self.policy_version = policy_version

    async def set_version(self, policy_version: int) -> None:
        """Set the policy version of the tokens from now on."""
        self.policy_version = policy_version


def spans(versions: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Return (version, begin, end) of consecutive tokens of the same version."""
    found: list[tuple[int, int, int]] = []
    for position, version in enumerate(versions):
        if found and found[-1][0] == version:
            found[-1] = (version, found[-1][1], position + 1)
        else:
            found.append((version, position, position + 1))
    return tuple(found)
