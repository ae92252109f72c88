"""The synchronous half of an engine: what a `Runner` steps on its thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quartet_rollout.engines.base import FinishReason, SamplingMask, SamplingSettings, SleepLevel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CoreCompletion:
    """A completion that ended, without its version spans."""

    key: str
    token_ids: np.ndarray
    """int32 [T]."""
    log_probs: np.ndarray
    """float32 [T]."""
    finish_reason: FinishReason
    mask: SamplingMask | None = None


class Core(Protocol):
    """A model and its running completions. Made, called and closed on one thread; no call waits for anything but the
    computation."""

    max_model_len: int
    vocab_size: int
    gives_masks: bool
    """Whether `SamplingSettings.masks` is served."""
    can_sleep: bool
    """Whether `sleep` frees anything here."""

    def add(self, key: str, prompt_token_ids: list[int], sampling: SamplingSettings) -> None:
        """Take in one completion; its seed, if any, is this completion's own."""

    def step(self) -> Iterable[CoreCompletion]:
        """Generate at most one token for each running completion; return those that ended."""

    def abort(self, keys: Iterable[str]) -> Iterable[CoreCompletion]:
        """End completions, returning what they have. Unknown keys are ignored."""

    def lengths(self) -> dict[str, int]:
        """Number of tokens generated so far, of every unfinished completion."""

    def tokens(self) -> int:
        """Number of tokens generated so far, of all unfinished completions together."""

    def running(self) -> int:
        """How many of the unfinished ones are being generated; the others wait for a place."""

    def kv_cache_use(self) -> float:
        """Fraction of the KV cache in use, 0 to 1; -1 without a fixed cache."""

    def hold(self) -> Iterable[CoreCompletion]:
        """Generate nothing until `go_on`, also where tokens are generated between two steps: return what has ended
        there meanwhile. Again is allowed."""

    def go_on(self) -> None:
        """End `hold`."""

    def install(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replace all parameters, between `hold` and `go_on`. The tensors are valid during the call only."""

    def reset_kv_cache(self) -> None:
        """Forget all keys and values, between `hold` and `go_on`; those of unfinished completions are computed again
        when they go on."""

    def sleep(self, level: SleepLevel) -> None:
        """Free the accelerator's memory, within `hold`; see `Engine.sleep`. Raises EngineError."""

    def wake(self) -> None:
        """Have it again, within `hold`."""

    def close(self) -> None:
        """Free everything."""
