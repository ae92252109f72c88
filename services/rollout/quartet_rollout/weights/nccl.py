"""The NCCL communicator of one group epoch: buckets straight into GPU memory.

The trainer puts the group's unique id into the epoch's store; all ranks then initialise at once. What has no deadline
in NCCL (meeting, a broadcast whose sender is gone) runs on a thread that may be lost, or is aborted here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from quartet.v1 import rollout_pb2

from quartet_common import nccl
from quartet_rollout.engines.base import WeightGroupInfo, WeightTransferError
from quartet_rollout.weights.gloo import connect_store, could_not_join

UNIQUE_ID_KEY = "nccl_unique_id"
_LOOK_SECONDS = 0.0005


class Stream:
    """A CUDA stream of our own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self.handle: int = self._stream.cuda_stream

    def after_current(self) -> None:
        """What follows waits for what the device's current stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def record(self) -> torch.cuda.Event:
        """Return what tells, by `query()`, whether all so far has been done."""
        return self._stream.record_event()


class NcclGroup:
    """A joined group, as a `Transport`."""

    def __init__(
        self, info: WeightGroupInfo, device: torch.device | None = None, make_stream: Callable = Stream
    ) -> None:
        """Meet all ranks. `device`: default, the current CUDA device. Raises WeightTransferError."""
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        try:
            store = connect_store(info)
            store.wait([UNIQUE_ID_KEY], timedelta(seconds=info.timeout_seconds))
            identity, limit = store.get(UNIQUE_ID_KEY), info.timeout_seconds
            self._communicator = nccl.Communicator(identity, info.rank, info.world_size, limit)
            self._stream = make_stream(self.device)
            one = torch.zeros(1, device=self.device)
            self._stream.after_current()
            self._communicator.sum_one(one.data_ptr(), self._stream.handle)
            self._wait(self._stream.record(), time.monotonic() + info.timeout_seconds)
        except RuntimeError as error:
            raise could_not_join(info, error) from error

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
        self._stream.after_current()
        events = []
        try:
            for bucket in buckets:
                self._communicator.broadcast(bucket.data_ptr(), bucket.numel(), self._stream.handle)
                events.append(self._stream.record())
        except nccl.NcclError as error:
            raise WeightTransferError(f"the broadcast of weights failed: {error}") from error
        for bucket, event in zip(buckets, events, strict=True):
            self._wait(event, deadline)
            arrived(bucket)

    def close(self) -> None:
        """Abort what is under way and leave."""
        self._communicator.abort()

    def _wait(self, work: torch.cuda.Event, deadline: float) -> None:
        while not work.query():
            if time.monotonic() > deadline:
                self._communicator.abort()
                raise WeightTransferError("the broadcast of weights did not end in time")
            time.sleep(_LOOK_SECONDS)
