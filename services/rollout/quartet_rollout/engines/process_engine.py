"""Base class of the engines that compute in child processes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from quartet_rollout.engines.base import UNKNOWN_VERSION, Engine, SamplingSettings, SleepLevel, check_prompt
from quartet_rollout.engines.model_folder import check_model_folder
from quartet_rollout.engines.weight_group import WeightGroupMixin
from quartet_rollout.errors import EngineError, PromptError


class ProcessEngine(WeightGroupMixin, Engine):
    """The states of an engine (not started, started, failed, closed, asleep), and the calls that each rejects."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self._begun = self._started = self._closed = False
        self._failure = ""
        self._tokenizer: Any = None
        self._vocab_size = 0
        self._asleep: SleepLevel | None = None
        self._version = UNKNOWN_VERSION

    def _begin(self) -> None:
        if self._begun:
            raise EngineError("the engine has been started already")
        self._begun = True
        check_model_folder(self._model_path)

    @property
    def policy_version(self) -> int:
        return UNKNOWN_VERSION if self.failure else self._version

    @property
    def failure(self) -> str:
        return self._failure

    def tokenizer(self) -> Any:
        return self._tokenizer

    async def sleep(self, level: SleepLevel = 1) -> None:
        self._check_usable()
        if self._asleep == level:
            return
        if self._asleep is not None:
            raise EngineError(f"the engine sleeps at level {self._asleep}; wake it first")
        if "sleep" not in self.capabilities():
            raise EngineError("this engine cannot sleep; allowed: an engine on a GPU, vllm with sleep_mode = true")
        await self._set_sleep(level)
        self._asleep = level

    async def wake(self) -> None:
        self._check_usable()
        if self._asleep is None:
            return
        if self._asleep == 2:  # The weights are gone: no token may be sampled as their version.
            await self.set_version(UNKNOWN_VERSION)
        await self._set_sleep(None)
        self._asleep = None

    @abstractmethod
    async def _set_sleep(self, level: SleepLevel | None) -> None:
        """Sleep at a level, or wake."""

    def _check_usable(self, awake: bool = False) -> None:
        if self._closed or not self._started:
            raise EngineError("the engine is closed" if self._closed else "the engine has not been started")
        if self.failure:
            raise EngineError(self.failure)
        if awake and self._asleep is not None:
            raise EngineError("the engine sleeps: wake it before weights are installed")

    def _check_request(self, prompt_token_ids: np.ndarray | list[int], n: int, sampling: SamplingSettings) -> list[int]:
        """Return the prompt as a list. Raises what the first `anext` of `Engine.generate` raises."""
        self._check_usable()
        prompt = check_prompt(prompt_token_ids, n, self.max_model_len, self._vocab_size)
        offered = self.capabilities()
        if sampling.masks and "sampling_masks" not in offered:
            raise PromptError("sampling.masks is true; allowed: false, as this engine cannot give the candidates")
        if sampling.routed_experts and "routed_experts" not in offered:
            raise PromptError("sampling.routed_experts is true; allowed: false, as this engine does not record them")
        return prompt
