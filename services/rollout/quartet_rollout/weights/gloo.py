"""The Gloo process group of one group epoch.

The trainer is rank 0 and hosts the store; every rollout is one or more ranks. The group is private: its own TCPStore
under a secret key prefix, and a bare `ProcessGroupGloo`, so that it can be made and dropped any number of times beside
whatever default process group an engine has.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from quartet_rollout.engines.base import WeightGroupInfo, WeightTransferError


class GlooGroup:
    """A joined group. Its calls block; run them on a thread that may be lost."""

    def __init__(self, info: WeightGroupInfo) -> None:
        """Meet all ranks of the group. Raises WeightTransferError at `info.timeout_seconds`, or sooner when the store
        is not there."""
        timeout = timedelta(seconds=info.timeout_seconds)
        try:
            store = TCPStore(info.store_host, info.store_port, info.world_size, is_master=False, timeout=timeout)
            prefixed = PrefixStore(f"quartet/{info.epoch}/{info.secret.hex()}", store)
            self._group: Any = ProcessGroupGloo(prefixed, info.rank, info.world_size, timeout)
        except RuntimeError as error:  # torch's DistError family
            where = f"{info.store_host}:{info.store_port}"
            raise WeightTransferError(
                f"could not join the weight group of epoch {info.epoch} at {where} as rank {info.rank} of "
                f"{info.world_size} within {info.timeout_seconds:g} s: {first_line(error)}"
            ) from error

    def broadcast(self, buffer: torch.Tensor, timeout_seconds: float) -> None:
        """Receive `buffer` (uint8, one dimension, on the CPU) from rank 0, in place. Raises WeightTransferError."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(timeout_seconds, 0.001))
        try:
            self._group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            raise WeightTransferError(f"the broadcast of weights failed: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text: torch appends C++ stack traces."""
    return str(error).partition("\n")[0]
