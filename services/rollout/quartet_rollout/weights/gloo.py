"""The Gloo process group of one group epoch.

The trainer is rank 0 and hosts the store; every rollout is one or more ranks. The group is private: its own store,
reached with the epoch's secret, and a bare `ProcessGroupGloo`, so that it can be made and dropped any number of times
beside whatever default process group an engine has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from quartet.v1 import rollout_pb2
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from quartet_rollout.engines.base import WeightGroupInfo, WeightTransferError
from quartet_rollout.weights.gated_store import GatedStore

# Broadcasts under way at a time: while one is checksummed and Gloo's thread fills the next, a third is announced.
_AHEAD = 3


class GlooGroup:
    """A joined group, as a `Transport`."""

    device = torch.device("cpu")

    def __init__(self, info: WeightGroupInfo) -> None:
        """Meet all ranks of the group. Raises WeightTransferError at `info.timeout_seconds`, or sooner when the store
        is not there."""
        self._left = False
        timeout = timedelta(seconds=info.timeout_seconds)
        try:
            self._store = connect_store(info)
            self._group: Any = ProcessGroupGloo(self._store, info.rank, info.world_size, timeout)
        except RuntimeError as error:  # torch's DistError family
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
        under_way: deque[tuple[torch.Tensor, Any]] = deque()
        try:
            for bucket in buckets:
                under_way.append((bucket, self._begin(bucket, deadline)))
                if len(under_way) > _AHEAD:
                    self._end(*under_way.popleft(), arrived)
            while under_way:
                self._end(*under_way.popleft(), arrived)
        except RuntimeError as error:
            if isinstance(error, WeightTransferError):
                raise
            raise WeightTransferError(f"the broadcast of weights failed: {first_line(error)}") from error

    def broadcast(self, buffer: torch.Tensor, timeout_seconds: float) -> None:
        """Receive one `buffer` (uint8, one dimension) from rank 0, in place. Raises RuntimeError."""
        self._begin(buffer, time.monotonic() + timeout_seconds).wait()

    def close(self) -> None:
        """Begin no more operations. One under way ends by its own deadline, on the thread that waits for it: whoever
        drops the last reference to the group waits too, and must not be the event loop."""
        self._left = True

    def _begin(self, bucket: torch.Tensor, deadline: float) -> Any:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        if self._left:
            raise WeightTransferError("the weight group was left during the transfer")
        return self._group.broadcast([bucket], options)

    def _end(self, bucket: torch.Tensor, work: Any, arrived: Callable[[torch.Tensor], None]) -> None:
        work.wait()
        arrived(bucket)


def connect_store(info: WeightGroupInfo) -> Store:
    """Return the epoch's part of the trainer's store. Raises RuntimeError when it is not there."""
    if info.store_gated:
        return GatedStore(info)
    timeout = timedelta(seconds=info.timeout_seconds)
    store = TCPStore(info.store_host, info.store_port, info.world_size, is_master=False, timeout=timeout)
    return PrefixStore(f"quartet/{info.epoch}/{info.secret.hex()}", store)


def could_not_join(info: WeightGroupInfo, error: Exception) -> WeightTransferError:
    """The error of a rendezvous that did not come about."""
    # torch names the store's keys, which begin with the secret: it is for nobody's log.
    reason = first_line(error).replace(info.secret.hex(), "…") if info.secret else first_line(error)
    return WeightTransferError(
        f"could not join the weight group of epoch {info.epoch} at {info.store_host}:{info.store_port} as rank "
        f"{info.rank} of {info.world_size} within {info.timeout_seconds:g} s: {reason}"
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's text: torch appends C++ stack traces."""
    return str(error).partition("\n")[0]
