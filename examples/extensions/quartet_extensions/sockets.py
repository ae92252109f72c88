"""A transport of weights over plain TCP: the trainer's end and the rollout's. No library but the standard one.

Each rollout connects, shows the epoch's secret, and is sent every bucket in order. What a transport promises to the
rest: buckets arrive whole and in order, or an error says why; no wait is without a deadline; no model is touched.
"""

import hmac
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from quartet_common.weights import Checksum


class Sockets:
    """The trainer's end: `quartet_trainer.publisher.transport.Transport`."""

    name = "sockets"
    device = torch.device("cpu")

    def __init__(self, host: str):
        """Listen at a free port of `host`, for all epochs."""
        self.libraries: dict[str, str] = {}
        self._listener = socket.create_server((host, 0))
        self.host, self.port = self._listener.getsockname()[:2]

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> "SocketChannel":
        """Wait for the rollouts of an epoch. Whoever does not know its secret is sent away.

        Raises:
            RuntimeError: they did not come in time.
        """
        deadline = time.monotonic() + timeout
        peers: list[socket.socket] = []
        while len(peers) < world_size - 1:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = self._listener.accept()
            except TimeoutError as error:
                for one in peers:
                    one.close()
                raise RuntimeError(f"{len(peers)} of {world_size - 1} rollouts came within {timeout:g} s") from error
            peer.settimeout(max(0.001, deadline - time.monotonic()))
            shown = bytearray(len(secret))
            with suppress(OSError, EOFError):
                receive(peer, memoryview(shown), deadline)
            if hmac.compare_digest(bytes(shown), secret):
                peer.settimeout(timeout)
                peers.append(peer)
            else:
                peer.close()
        return SocketChannel(peers)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


class SocketChannel:
    """One epoch's connections: `quartet_trainer.publisher.transport.Channel`."""

    def __init__(self, peers: list[socket.socket]):
        self._peers = peers

    def carry(self, carriage) -> int:
        """Send every bucket to all, and return the checksum of what was sent. Raises TransferFailed."""
        carriage.begin()
        checksum = Checksum()
        for bucket in carriage.buckets():
            content = memoryview(bucket.numpy())
            for peer in self._peers:
                carriage.check()
                try:
                    peer.sendall(content)
                except OSError as error:
                    from quartet_trainer.publisher.calls import TransferFailed

                    raise TransferFailed(f"a rollout could not be sent a bucket: {error}") from error
            checksum.update(content)
        return checksum.value()

    def drop(self, wait: float = 0.0) -> None:
        """Leave the epoch."""
        for peer in self._peers:
            peer.close()


class SocketReceiver:
    """The rollout's end: `quartet_rollout.weights.transport.Transport`."""

    device = torch.device("cpu")

    def __init__(self, info):
        """Connect as a member of `info`'s epoch. Raises WeightTransferError."""
        try:
            self._peer = socket.create_connection((info.store_host, info.store_port), info.timeout_seconds)
            self._peer.sendall(info.secret)
        except OSError as error:
            raise failed(f"could not join epoch {info.epoch}: {error}") from error

    def fill(
        self,
        manifest,
        buckets: Sequence[torch.Tensor],
        path: str,
        timeout_seconds: float,
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        """Fill each bucket and say so. Raises WeightTransferError at the deadline, or when the trainer is gone."""
        deadline = time.monotonic() + timeout_seconds
        for bucket in buckets:
            try:
                receive(self._peer, memoryview(bucket.numpy()), deadline)
            except TimeoutError as error:
                raise failed(f"the weights did not come within {timeout_seconds:g} s") from error
            except (OSError, EOFError) as error:
                raise failed(f"the weights broke off: {error}") from error
            arrived(bucket)

    def close(self) -> None:
        """Leave the group."""
        self._peer.close()


def receive(peer: socket.socket, into: memoryview, deadline: float) -> None:
    """Fill a buffer. Raises TimeoutError at the deadline, EOFError when the other end closes."""
    while into:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peer.settimeout(left)
        count = peer.recv_into(into)
        if not count:
            raise EOFError("the other end has closed")
        into = into[count:]


def failed(sentence: str) -> Exception:
    """The error by which a rollout tells that a transfer did not come about."""
    from quartet_rollout.engines.base import WeightTransferError

    return WeightTransferError(sentence)
