"""The process group of an epoch, over Gloo or NCCL, as a `Transport` into host memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from quartet.v1 import rollout_pb2
from torch.distributed import TCPStore

from quartet_rollout.engines.base import WeightGroupInfo, WeightTransferError
from quartet_weights.process_group import ProcessGroup, address_towards, epoch_store, first_line

# Broadcasts under way at a time: one is checksummed, a thread of the backend fills the next, a third is announced.
_AHEAD = 3


class GroupTransport:
    """A joined group."""

    device = torch.device("cpu")

    def __init__(self, info: WeightGroupInfo) -> None:
        """Meet all ranks. Raises WeightTransferError at `info.timeout_seconds`, or sooner without a store."""
        timeout = timedelta(seconds=info.timeout_seconds)
        try:
            store = TCPStore(info.store_host, info.store_port, info.world_size, is_master=False, timeout=timeout)
            own = epoch_store(store, info.epoch, info.secret)
            here = address_towards(info.store_host, info.store_port)
            self.group = ProcessGroup(
                info.transport, own, info.rank, info.world_size, info.timeout_seconds, here, info.interface
            )
        except (OSError, RuntimeError) as error:  # torch's DistError family
            raise WeightTransferError(
                f"could not join the weight group of epoch {info.epoch} at {info.store_host}:{info.store_port} as rank "
                f"{info.rank} of {info.world_size} within {info.timeout_seconds:g} s: {first_line(error, info.secret)}"
            ) from error
        self._staging: list[torch.Tensor] = []

    def fill(
        self,
        manifest: rollout_pb2.WeightManifest,
        buckets: Sequence[torch.Tensor],
        path: str,
        timeout_seconds: float,
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        """See `Transport.fill`."""
        deadline = time.monotonic() + timeout_seconds
        under_way: deque[Callable[[], None]] = deque()

        def begin(index: int, bucket: torch.Tensor) -> Callable[[], None]:
            landing = self._landing(index, bucket, max(manifest.bucket_bytes))
            wait = self.group.broadcast(landing, deadline)

            def end() -> None:
                wait(lambda: None)
                if landing is not bucket:
                    bucket.copy_(landing)
                arrived(bucket)

            return end

        try:
            for index, bucket in enumerate(buckets):
                if len(under_way) == _AHEAD:
                    under_way.popleft()()
                under_way.append(begin(index, bucket))
            while under_way:
                under_way.popleft()()
        except RuntimeError as error:
            raise WeightTransferError(f"the broadcast of weights failed: {first_line(error)}") from error

    def _landing(self, index: int, bucket: torch.Tensor, largest: int) -> torch.Tensor:
        """Where a bucket arrives: itself, or one of a few buffers on the GPU, which is copied to it."""
        if self.group.device == bucket.device:
            return bucket
        if not self._staging or self._staging[0].numel() < largest:
            self._staging = [torch.empty(largest, dtype=torch.uint8, device=self.group.device) for _ in range(_AHEAD)]
        return self._staging[index % _AHEAD][: bucket.numel()]

    def close(self) -> None:
        """Give up what is under way and leave."""
        self.group.close()
