"""Extension of vLLM's workers. vLLM imports it in the worker processes and mixes `WorkerExtension` into its class."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

import numpy as np
import torch
import vllm.distributed.utils
from vllm.platforms import current_platform

from quartet_rollout.engines.base import SamplingMask
from quartet_rollout.engines.masks import candidates, join
from quartet_rollout.engines.vllm_engine.weight_transfer import BucketTransferEngine, register

register()

if current_platform.is_cpu():
    # vllm/distributed/utils.py:45: processes wait for each other in loops of `sched_yield`. Under Linux 6.18 the loops
    # take the CPUs of a small host for minutes, also from the process that they wait for. False is vLLM's alternative,
    # a sleep of 50 us; a step of a model on a CPU takes longer.
    vllm.distributed.utils.USE_SCHED_YIELD = False

OWNER = "QUARTET_ENGINE_OWNER"
"""Environment variable: process id of the rollout that started vLLM's processes."""


def end_with(owner: int) -> None:
    """Exit when process `owner` has ended: vLLM's processes would wait forever for its requests."""
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        select.select([watched], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="owner", daemon=True).start()
    os.setpgid(0, 0)  # Ctrl-C in a terminal reaches only the rollout, which drains first.


if int(os.environ.get(OWNER, os.getpid())) != os.getpid():
    end_with(int(os.environ[OWNER]))


KEY = "quartet_mask"
"""Key in `SamplingParams.extra_args`; the value identifies a completion whose masks are recorded."""


class MaskRecorder(torch.nn.Module):
    """Wraps the `topk_topp_sampler` of a model runner's sampler and records the candidates that the filters left for
    each token.

    vLLM's own `return_sampling_mask` needs model runner V2 (GPUs with Triton), and a top_k and a temperature above 0
    in every request. This wrapper works in model runner V1: the one on the CPU, and with `VLLM_USE_V2_MODEL_RUNNER=0`
    the one on a GPU.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._runner = model_runner
        self._inner = model_runner.sampler.topk_topp_sampler
        self._recorded: dict[str, list[np.ndarray]] = {}

    @classmethod
    def attach(cls, runner: Any) -> MaskRecorder | None:
        """Install a recorder in a model runner; return None if its sampler cannot be wrapped."""
        if not (hasattr(runner, "discard_request_mask") and hasattr(runner.sampler, "topk_topp_sampler")):
            return None
        recorder = runner.sampler.topk_topp_sampler = cls(runner)
        return recorder

    def take(self, key: str, tokens: int) -> SamplingMask:
        """Return and drop the mask of a finished completion of `tokens` tokens."""
        return join(self._recorded.pop(key, [])[:tokens])

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, log_probs = self._inner(*args, **kwargs)
        if log_probs is not None:
            self._record(log_probs)
        return sampled, log_probs

    def _record(self, log_probs: torch.Tensor) -> None:
        ids = self._runner.input_batch.req_ids[: len(log_probs)]
        # With chunked prefill vLLM samples after each chunk, and discards all tokens but the last chunk's.
        discarded = self._runner.discard_request_mask.np
        keys = {row: self._key(name) for row, name in enumerate(ids) if not discarded[row]}
        rows = [row for row, key in keys.items() if key]
        if rows:
            for row, left in zip(rows, candidates(log_probs[rows]), strict=True):
                self._recorded.setdefault(keys[row], []).append(left)

    def _key(self, request_id: str) -> str:
        """Return the key for `take`; "" for a request without masks."""
        parameters = self._runner.requests[request_id].sampling_params
        return (parameters.extra_args or {}).get(KEY, "")


class WorkerExtension:
    """Weight groups and sampling masks. No method may block: vLLM generates nothing meanwhile."""

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
        """Start to record sampling masks. Returns whether this worker supports it."""
        self.quartet_masks = MaskRecorder.attach(self.model_runner)
        return self.quartet_masks is not None

    def quartet_take_masks(self, key: str, tokens: int) -> list[bytes]:
        """Return counts and ids (int32) of the mask of a finished completion of `tokens` tokens."""
        assert self.quartet_masks is not None
        mask = self.quartet_masks.take(key, tokens)
        return [mask.counts.tobytes(), mask.token_ids.tobytes()]
