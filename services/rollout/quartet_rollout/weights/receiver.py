"""Receives weight updates into buffers of its own.

Blocking, so that it runs where a thread may be lost: beside an engine in the same process, or in an engine's worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import torch
from quartet.v1 import rollout_pb2

from quartet_common.weights import Checksum
from quartet_rollout.engines.base import EngineError, WeightGroupInfo, WeightTransferError
from quartet_rollout.weights.gloo import GlooGroup
from quartet_rollout.weights.manifest import views


class WeightReceiver:
    """At most one group and one received update.

    A call that its caller gave up (deadline, `leave`) may still be blocked on a thread of its own. It then owns its
    group and its buffers alone, and its late result is thrown away.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: GlooGroup | None = None
        self._membership = 0  # Counts joins and leaves: a call that outlived its membership must not have an effect.
        self._spare: list[torch.Tensor] = []  # Touching fresh memory costs more than receiving into it.
        self._received: tuple[rollout_pb2.WeightManifest, list[torch.Tensor]] | None = None

    def join(self, info: WeightGroupInfo) -> None:
        """Leave any group and join this one. Raises WeightTransferError; EngineError for another transport."""
        if info.transport != "gloo":
            raise EngineError(f"weight transport '{info.transport}' is not available here; allowed: gloo")
        membership = self.leave()
        group = GlooGroup(info)
        with self._lock:
            if self._membership != membership:
                raise WeightTransferError(f"gave up joining the weight group of epoch {info.epoch}")
            self._group = group

    def leave(self) -> int:
        """Leave the group, if any, and forget what was received. Returns the count of the new membership."""
        self.discard()
        with self._lock:
            self._group = None
            self._membership += 1
            return self._membership

    def receive(self, manifest: rollout_pb2.WeightManifest, timeout_seconds: float) -> int:
        """Receive the manifest's buckets, in order; return their checksum.

        Raises EngineError when in no group; WeightTransferError when the sender is gone or the time is over, and then
        the group has been left: buckets that come late would be taken for those of the next update.
        """
        deadline = time.monotonic() + timeout_seconds
        self.discard()
        with self._lock:
            group, membership = self._group, self._membership
            buckets, self._spare = _fit(self._spare, manifest.bucket_bytes), []
        if group is None:
            raise EngineError("weights were announced, but this rollout is in no weight group")
        checksum = Checksum()
        try:
            for bucket in buckets:
                group.broadcast(bucket, deadline - time.monotonic())
                checksum.update(bucket.numpy())
        except WeightTransferError:
            with self._lock:
                if self._membership == membership:
                    self._group = None
            raise
        with self._lock:
            if self._membership != membership:
                raise WeightTransferError("the weight group was left during the transfer")
            self._received = (manifest, buckets)
        return checksum.value()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) of what was received; valid until `discard`, `leave` or `receive`."""
        with self._lock:
            received = self._received
        if received is None:
            raise EngineError("no weights were received that could be installed")
        return views(*received)

    def discard(self) -> None:
        """Forget what was received; its buffers serve the next update."""
        with self._lock:
            if self._received is not None:
                self._spare, self._received = self._received[1], None


def _fit(spare: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return uint8 buffers of these sizes, from `spare` where the sizes agree."""
    return [
        spare[i] if i < len(spare) and spare[i].numel() == size else torch.empty(size, dtype=torch.uint8)
        for i, size in enumerate(sizes)
    ]
