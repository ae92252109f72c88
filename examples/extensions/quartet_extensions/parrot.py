"""An engine: it says the prompt again, token by token. A policy of certainty, so every log-prob is 0.

It does everything that an engine must: several completions of a prompt, length limits, aborts, pauses between two
tokens, versions of weights. It receives weights, checks and counts them, and has no use for them.
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
    """What a run may say of it: `[rollout.engine_parameters]`."""

    seconds_per_token: float = Field(0.0, ge=0, description="How slowly it speaks.")


class Parrot:
    """What the entry point names."""

    name = "parrot"
    description = "Says the prompt again."
    parameters = ParrotParameters

    def create(self, model_path: str, parameters: ParrotParameters) -> "ParrotEngine":
        """Nothing is loaded before `start`."""
        return ParrotEngine(model_path, parameters)


class ParrotEngine(WeightGroupMixin):
    """`quartet_rollout.engines.Engine`. `WeightGroupMixin` brings the group, the transfer and its checksum."""

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
        self._may_speak = asyncio.Event()
        self._aborted: dict[str, asyncio.Event] = {}
        self._speaking = self._spoken = 0

    async def start(self) -> None:
        """Read the model's names, shapes and tokenizer."""
        from quartet_rollout.engines.model_folder import check_model_folder, load_tokenizer

        check_model_folder(self._model_path)
        await self.load_spec()
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._model_path)
        self._may_speak.set()

    async def close(self) -> None:
        """End what is unfinished."""
        await self.leave_weight_group()
        for request_id in list(self._aborted):
            await self.abort(request_id)

    def tokenizer(self) -> Any:
        """The model's."""
        return self._tokenizer

    async def generate(
        self, request_id: str, prompt_token_ids: np.ndarray | list[int], n: int, sampling: SamplingSettings
    ) -> AsyncGenerator[EngineCompletion, None]:
        """Each completion is the prompt, as far as limits allow."""
        prompt = check_prompt(prompt_token_ids, n, self.max_model_len, len(self._tokenizer))
        room = min(sampling.max_new_tokens, self.max_model_len - len(prompt))
        aborted = self._aborted[request_id] = asyncio.Event()
        try:
            for index in range(n):
                yield await self._say(index, prompt[:room], len(prompt) > room, aborted)
        finally:
            del self._aborted[request_id]

    async def _say(self, index: int, words: list[int], cut: bool, aborted: asyncio.Event) -> EngineCompletion:
        versions: list[int] = []
        self._speaking += 1
        try:
            for _ in words:
                if not self._may_speak.is_set():
                    waits = {asyncio.create_task(event.wait()) for event in (self._may_speak, aborted)}
                    _, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for wait in left:
                        wait.cancel()
                if aborted.is_set():
                    break
                versions.append(self.policy_version)
                self._spoken += 1
                await asyncio.sleep(self._seconds)
        finally:
            self._speaking -= 1
        said = len(versions)
        reason = "abort" if said < len(words) else "length" if cut else "stop"
        return EngineCompletion(
            index, np.asarray(words[:said], np.int32), np.zeros(said, np.float32), reason, spans(versions)
        )

    async def abort(self, request_id: str) -> None:
        """End a request with what was said."""
        if request_id in self._aborted:
            self._aborted[request_id].set()

    async def pause(self, mode: str, keep_kv_cache: bool = False) -> int:
        """Fall silent between two tokens."""
        running = self._speaking
        if mode == "abort":
            for request_id in list(self._aborted):
                await self.abort(request_id)
        if mode != "wait":
            self._may_speak.clear()
            return running
        while self._speaking:
            await asyncio.sleep(self._seconds or 0.001)
        self._may_speak.clear()
        return running

    async def resume(self) -> None:
        """Go on."""
        self._may_speak.set()

    async def sleep(self, level: int = 1) -> None:
        """It has no accelerator whose memory it could give away."""
        raise EngineError("a parrot cannot sleep: it holds no memory of a GPU")

    async def wake(self) -> None:
        """It is always awake."""

    def stats(self) -> EngineStats:
        """What it is doing."""
        return EngineStats(self._speaking, 0, -1.0, self._spoken)

    def capabilities(self) -> list[str]:
        """Weights by every transport of this process."""
        return self.weight_capabilities()

    async def install_weights(self, policy_version: int) -> None:
        """Count what was received."""
        self.installed = sum(1 for _ in self.received_tensors())
        self.policy_version = policy_version

    async def set_version(self, policy_version: int) -> None:
        """What it says from now on is of this version."""
        self.policy_version = policy_version


def spans(versions: list[int]) -> tuple[tuple[int, int, int], ...]:
    """(version, begin, end) of the tokens that belong together."""
    found: list[tuple[int, int, int]] = []
    for position, version in enumerate(versions):
        if found and found[-1][0] == version:
            found[-1] = (version, found[-1][1], position + 1)
        else:
            found.append((version, position, position + 1))
    return tuple(found)
