"""The Gloo and NCCL transports: torch process groups, one for each epoch, and the store through which ranks meet.

Buckets are broadcast; the next bucket is packed while earlier ones are sent and checksummed.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from quartet_common.ports import AddressUnavailable
from quartet_trainer.weight_sync.packing import BUFFERS
from quartet_trainer.weight_sync.transports import TransferFailed, Transport, WeightUpdate
from quartet_weights.process_group import ProcessGroup, device_of, epoch_store, first_line, nccl_version

# Forming a group takes about a second.
JOIN_SECONDS = 20.0
_TIMEOUT = timedelta(seconds=JOIN_SECONDS)

Wait = Callable[[Callable[[], None]], None]
"""Waits until a bucket has been sent; calls its argument meanwhile."""


class WeightStore:
    """A TCPStore for all epochs, at one address. Each epoch's keys begin with its secret, which only members have."""

    def __init__(self, host: str, port: int = 0):
        """Listen at host:port; port 0 takes a free one. Raises AddressUnavailable if it cannot."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            raise AddressUnavailable(
                f"trainer.weights.store_host: cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}"
            ) from error
        self.host = host
        self.port: int = listener.getsockname()[1]
        # By default TCPStore listens on all interfaces; with `master_listen_fd` only on that socket, which it owns.
        self._server: dist.TCPStore | None = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=listener.detach(),
        )

    def epoch(self, epoch: int, secret: bytes) -> dist.Store:
        """Return rank 0's end of an epoch's store. Raises RuntimeError after `close`."""
        # A connection for each epoch, because a blocking wait blocks the connection.
        return epoch_store(dist.TCPStore(self.host, self.port, is_master=False, timeout=_TIMEOUT), epoch, secret)

    def close(self) -> None:
        """Stop listening."""
        self._server = None  # TCPStore closes its sockets when the last reference is gone.


class GroupTransport(Transport):
    """The transport over Gloo or NCCL."""

    def __init__(self, backend: str, store: WeightStore, interface: str = ""):
        """`interface`: this end's network interface; default: that of the store's address."""
        self.device = device_of(backend)
        self.libraries = {"nccl": nccl_version()} if backend == "nccl" else {}
        self._backend, self._store, self._interface = backend, store, interface

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> GroupChannel:
        store = self._store.epoch(epoch, secret)
        group = ProcessGroup(self._backend, store, 0, world_size, timeout, self._store.host, self._interface)
        return GroupChannel(group, timeout)


class GroupChannel:
    """Rank 0 of a group."""

    def __init__(self, group: ProcessGroup, timeout: float):
        self._group, self._timeout = group, timeout

    def transfer(self, update: WeightUpdate) -> None:
        update.begin()
        under_way: deque[Wait] = deque()
        for bucket in update.buckets():
            under_way.append(self.send(bucket))
            if len(under_way) == BUFFERS:  # the next bucket overwrites the oldest
                under_way.popleft()(update.check)
        while under_way:
            under_way.popleft()(update.check)

    def send(self, bucket: torch.Tensor) -> Wait:
        """Start sending a bucket, uint8, to all members. Return a function that waits for it and, as this does, raises
        TransferFailed."""
        with _raising_transfer_failed():
            wait = self._group.broadcast(bucket, time.monotonic() + self._timeout)
        return _raising_transfer_failed()(wait)

    def drop(self, wait: float = 0.0) -> None:
        self._group.close(wait)


@contextmanager
def _raising_transfer_failed() -> Iterator[None]:
    """Turn torch's RuntimeError into TransferFailed."""
    try:
        yield
    except RuntimeError as error:
        raise TransferFailed(f"the broadcast failed: {first_line(error)}") from error
