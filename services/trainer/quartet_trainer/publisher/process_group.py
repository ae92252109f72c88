"""Gloo and NCCL: torch's process groups, one for each epoch."""

from __future__ import annotations

import time

import torch
from quartet.v1 import rollout_pb2

from quartet_trainer.publisher.calls import TransferFailed
from quartet_trainer.publisher.pipeline import send_all
from quartet_trainer.publisher.store import WeightStore
from quartet_trainer.publisher.transport import Carriage, Wait
from quartet_weights.process_group import ProcessGroup, device_of, first_line, nccl_version

_CODES = {"gloo": rollout_pb2.WEIGHT_TRANSPORT_GLOO, "nccl": rollout_pb2.WEIGHT_TRANSPORT_NCCL}


class GroupTransport:
    """The `Transport` of a backend."""

    def __init__(self, backend: str, store: WeightStore, interface: str = ""):
        """`interface`: network interface of the group here; default: that of the store's address."""
        self.name, self.code, self.device = backend, _CODES[backend], device_of(backend)
        self.libraries = {"nccl": nccl_version()} if backend == "nccl" else {}
        self._store, self._interface = store, interface

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> GroupChannel:
        """See `Transport.meet`."""
        store = self._store.epoch(epoch, secret)
        group = ProcessGroup(self.name, store, 0, world_size, timeout, self._store.host, self._interface)
        return GroupChannel(group, timeout)


class GroupChannel:
    """Rank 0 of a group."""

    def __init__(self, group: ProcessGroup, timeout: float):
        self._group, self._timeout = group, timeout

    def carry(self, carriage: Carriage) -> int:
        """See `Channel.carry`."""
        return send_all(carriage, self.send)

    def send(self, bucket: torch.Tensor) -> Wait:
        """Begin to send a bucket, uint8, to all. Returns a function that waits for its end; raises TransferFailed."""
        deadline = time.monotonic() + self._timeout
        try:
            ended = self._group.broadcast(bucket, deadline)
        except RuntimeError as error:
            raise TransferFailed(f"the broadcast failed: {first_line(error)}") from error

        def wait(check) -> None:
            try:
                ended(check)
            except RuntimeError as error:
                raise TransferFailed(f"the broadcast failed: {first_line(error)}") from error

        return wait

    def drop(self, wait: float = 0.0) -> None:
        """See `Channel.drop`."""
        self._group.close(wait)
