"""What our engine adds to vLLM's workers; vLLM imports it where they run and mixes it into its worker class."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

from quartet_rollout.engines.vllm_engine.masks import MaskRecorder
from quartet_rollout.engines.vllm_engine.weight_transfer import register

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
    """Sampling masks; weights come by the backend that this module registers."""

    quartet_masks: MaskRecorder | None
    model_runner: Any

    def quartet_attach_masks(self) -> bool:
        """Have the sampler's candidates noted. Returns whether it can be done."""
        self.quartet_masks = MaskRecorder.attach(self.model_runner)
        return self.quartet_masks is not None

    def quartet_want_masks(self, request_id: str) -> None:
        """Note the candidates of this request."""
        assert self.quartet_masks is not None
        self.quartet_masks.want(request_id)

    def quartet_take_masks(self, request_id: str, tokens: int) -> list[bytes]:
        """Counts and ids (int32) of the mask of a request that has ended with so many tokens."""
        assert self.quartet_masks is not None
        mask = self.quartet_masks.take(request_id, tokens)
        return [mask.counts.tobytes(), mask.token_ids.tobytes()]
