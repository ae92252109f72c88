"""What is added to vLLM's workers; vLLM imports it where they run and mixes it into its worker class."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

from quartet_rollout.engines.vllm_engine.masks import MaskRecorder
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
