"""What is added to vLLM's workers; vLLM imports it where they run and mixes it into its worker class."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

import numpy as np
import torch

from quartet_rollout.engines.base import SamplingMask
from quartet_rollout.engines.masks import candidates, join
from quartet_rollout.engines.vllm_engine.weight_transfer import BucketTransferEngine, register

register()

OWNER = "QUARTET_ENGINE_OWNER"
"""Environment variable: process id of the rollout that started vLLM's processes."""


def end_with(owner: int) -> None:
    """End this process when another one has ended: vLLM's processes would wait for its requests for ever."""
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        select.select([watched], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="owner", daemon=True).start()
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the rollout, which drains first.


if int(os.environ.get(OWNER, os.getpid())) != os.getpid():
    end_with(int(os.environ[OWNER]))


KEY = "quartet_mask"
"""In `SamplingParams.extra_args`: the completion's key, where its masks are wanted."""


class MaskRecorder(torch.nn.Module):
    """Stands in for the `topk_topp_sampler` of a model runner's sampler: it notes what the filters left of the
    vocabulary for each token.

    vLLM's own `return_sampling_mask` needs its second model runner (GPUs with Triton), and a top_k and a temperature
    above 0 in every request. The first model runner, the one on the CPU, cannot do it; `VLLM_USE_V2_MODEL_RUNNER=0`
    chooses it on a GPU.
    """

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


class WorkerExtension:
    """Weight groups and sampling masks. Each method returns at once: vLLM generates nothing meanwhile."""

    quartet_masks: MaskRecorder | None
    model_runner: Any
    vllm_config: Any
    rank: int
    weight_transfer_engine: BucketTransferEngine

    def quartet_weights(self, method: str, *args: Any) -> Any:
        """Call a method of this worker's `WeightReceiver`."""
        parallel, receiver = self.vllm_config.parallel_config, self.weight_transfer_engine.receiver
        receiver.member = parallel.data_parallel_index * parallel.world_size + self.rank
        return getattr(receiver, method)(*args)

    def quartet_attach_masks(self) -> bool:
        """Have the sampler's candidates noted. Returns whether it can be done."""
        self.quartet_masks = MaskRecorder.attach(self.model_runner)
        return self.quartet_masks is not None

    def quartet_take_masks(self, key: str, tokens: int) -> list[bytes]:
        """Counts and ids (int32) of the mask of a completion that has ended with so many tokens."""
        assert self.quartet_masks is not None
        mask = self.quartet_masks.take(key, tokens)
        return [mask.counts.tobytes(), mask.token_ids.tobytes()]
