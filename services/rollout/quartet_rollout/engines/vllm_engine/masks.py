"""What vLLM's sampler left of the vocabulary for each token, taken where the sampler knows it.

vLLM has an option of its own, `return_sampling_mask`, which needs its second model runner (GPUs with Triton), a top_k
and a temperature above 0 in every request. The first model runner, the one on the CPU, cannot do it: there, the last
stage of its sampler is followed by a note of the candidates. `VLLM_USE_V2_MODEL_RUNNER=0` chooses the first one on a
GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quartet_rollout.engines.base import SamplingMask
from quartet_rollout.engines.masks import candidates, join

KEY = "quartet_mask"
"""In `SamplingParams.extra_args`: the completion's key, where its masks are wanted."""


class MaskRecorder(torch.nn.Module):
    """Stands in for the `topk_topp_sampler` of a model runner's sampler."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._runner = model_runner
        self._inner = model_runner.sampler.topk_topp_sampler
        self._recorded: dict[str, list[np.ndarray]] = {}

    @classmethod
    def attach(cls, runner: Any) -> MaskRecorder | None:
        """Put a recorder into a model runner; None where it has no place for one."""
        if not (hasattr(runner, "discard_request_mask") and hasattr(runner.sampler, "topk_topp_sampler")):
            return None
        recorder = runner.sampler.topk_topp_sampler = cls(runner)
        return recorder

    def take(self, key: str, tokens: int) -> SamplingMask:
        """The mask of a completion that has ended with so many tokens."""
        return join(self._recorded.pop(key, [])[:tokens])

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, log_probs = self._inner(*args, **kwargs)
        if log_probs is not None:
            self._record(log_probs)
        return sampled, log_probs

    def _record(self, log_probs: torch.Tensor) -> None:
        ids = self._runner.input_batch.req_ids[: len(log_probs)]
        # A prompt that is computed in parts is sampled from after each part; only the last one's token counts.
        thrown_away = self._runner.discard_request_mask.np
        keys = {row: self._key(name) for row, name in enumerate(ids) if not thrown_away[row]}
        rows = [row for row, key in keys.items() if key]
        if rows:
            for row, left in zip(rows, candidates(log_probs[rows]), strict=True):
                self._recorded.setdefault(keys[row], []).append(left)

    def _key(self, request_id: str) -> str:
        """What `take` will ask for; "" for a request without masks."""
        parameters = self._runner.requests[request_id].sampling_params
        return (parameters.extra_args or {}).get(KEY, "")
