"""Receives weight updates into buffers of its own.

Blocking, so that it runs where a thread may be lost: beside an engine in the same process, or in an engine's worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import torch
from quartet.v1 import rollout_pb2

from quartet_common.weights import BackgroundChecksum
from quartet_rollout.engines.base import EngineError, WeightGroupInfo, WeightTransferError
from quartet_rollout.weights import transport
from quartet_rollout.weights.adapter import Base
from quartet_rollout.weights.manifest import views
from quartet_rollout.weights.transport import Transport


class WeightReceiver:
    """At most one group and one received update.

    A call that its caller gave up (deadline, `leave`) may still be blocked on a thread of its own. It then owns its
    group and its buffers alone, and its late result is thrown away.
    """

    def __init__(self, base: Base | None = None) -> None:
        """`base`: what adapters are added to; without one they are refused."""
        self.base = base
        self._lock = threading.Lock()
        self._group: Transport | None = None
        self._membership = 0  # Counts joins and leaves: a call that outlived its membership must not have an effect.
        self._spare: list[torch.Tensor] = []  # Touching fresh memory costs more than receiving into it.
        self._received: tuple[rollout_pb2.WeightManifest, list[torch.Tensor]] | None = None

    def join(self, info: WeightGroupInfo) -> None:
        """Leave any group and join this one. Raises WeightTransferError; EngineError for another transport."""
        membership = self.leave()
        group = transport.join(info)
        with self._lock:
            if self._membership == membership:
                self._group = group
                return
        group.close()
        raise WeightTransferError(f"gave up joining the weight group of epoch {info.epoch}")

    def leave(self) -> int:
        """Leave the group, if any, and forget what was received. Returns the count of the new membership."""
        self.discard()
        with self._lock:
            group, self._group = self._group, None
            self._membership += 1
            membership = self._membership
        if group is not None:
            group.close()
        return membership

    def receive(self, manifest: rollout_pb2.WeightManifest, timeout_seconds: float, path: str = "") -> int:
        """Receive the manifest's buckets; return their checksum. `path`: where they are, with the file transport.

        Raises EngineError when in no group, and for an adapter of another base model; WeightTransferError when the
        sender is gone or the time is over, and then the group has been left: buckets that come late would be taken for
        those of the next update.
        """
        deadline = time.monotonic() + timeout_seconds
        self.discard()
        with self._lock:
            group, membership = self._group, self._membership
            if group is None:
                raise EngineError("weights were announced, but this rollout is in no weight group")
            buckets, self._spare = _fit(self._spare, manifest.bucket_bytes, group.device), []
        if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA:
            self._base_for().check(manifest.lora)
        checksum = BackgroundChecksum()
        try:
            group.fill(
                manifest,
                buckets,
                path,
                deadline - time.monotonic(),
                lambda bucket: checksum.add(lambda: memoryview(bucket.cpu().numpy())),
            )
            value = checksum.value()
        except WeightTransferError:
            with self._lock:
                if self._membership == membership:
                    self._group = None
            group.close()
            raise
        finally:
            checksum.close()
        with self._lock:
            if self._membership != membership:
                raise WeightTransferError("the weight group was left during the transfer")
            self._received = (manifest, buckets)
        return value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) of all parameters: what was received, or the base model with the adapter
        that was. Valid until `discard`, `leave` or `receive`."""
        with self._lock:
            received = self._received
        if received is None:
            raise EngineError("no weights were received that could be installed")
        manifest, buckets = received
        if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA:
            return self._base_for().merged(manifest.lora, dict(views(manifest, buckets)))
        return views(manifest, buckets)

    @property
    def has_received(self) -> bool:
        """Whether `tensors` has something to yield."""
        with self._lock:
            return self._received is not None

    def discard(self) -> None:
        """Forget what was received; its buffers serve the next update."""
        with self._lock:
            if self._received is not None:
                self._spare, self._received = self._received[1], None

    def _base_for(self) -> Base:
        if self.base is None:
            raise EngineError("an adapter was announced, and there is no base model that it could be added to")
        return self.base


def _fit(spare: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return uint8 buffers of these sizes, from `spare` where sizes and device agree."""
    return [
        spare[i]
        if i < len(spare) and spare[i].numel() == size and spare[i].device == device
        else torch.empty(size, dtype=torch.uint8, device=device)
        for i, size in enumerate(sizes)
    ]
