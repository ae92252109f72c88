"""A transport of weights over plain TCP: the trainer's end and the rollout's. No library but the standard one.

Each rollout connects, shows the epoch's secret, and is sent every bucket in order. What a transport promises to the
rest: buckets arrive whole and in order, or an error says why; no wait is without a deadline; no model is touched.
"""

import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from pydantic import Field

from quartet_common.transports import TransportParameters

LOOK_SECONDS = 0.1
SHOW_SECONDS = 2.0


class SocketsParameters(TransportParameters):
    """[trainer.weights.transport_parameters]"""

    port: int = Field(0, ge=0, le=65535, description="Port at which the trainer listens; 0: any free one.")


class Sockets:
    """What the entry point names. Torch is imported by what it makes: this module is read when a service starts."""

    name = "sockets"
    description = "Weights over plain TCP, one connection for each rollout."
    parameters = SocketsParameters

    def trainer_end(self, parameters, host, folder):
        """The end that sends; only the trainer asks for it."""
        return SocketSender(host, parameters.port)

    def rollout_end(self, info):
        """The end that receives, joined; only a rollout asks for it."""
        return SocketReceiver(info)


class SocketSender:
    """The trainer's end: `quartet_trainer.weight_sync.transports.Transport`."""

    def __init__(self, host: str, port: int = 0):
        """Listen at an address, which is to be had or not: OSError."""
        import torch

        self.device = torch.device("cpu")
        self.libraries: dict[str, str] = {}
        self._epoch, self._listener = -1, socket.create_server((host, port))
        self._listener.settimeout(LOOK_SECONDS)
        self._address = self._listener.getsockname()
        self._meeting = threading.Lock()

    def invite(self, epoch: int) -> dict[str, str]:
        """Say where rollouts come to, once an abandoned `meet` has ended: it would refuse this epoch's members."""
        self._epoch = epoch
        with self._meeting:
            return {"host": self._address[0], "port": str(self._address[1])}

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> "SocketChannel":
        """Wait for the rollouts of an epoch. Whoever does not know its secret is sent away.

        Raises:
            RuntimeError: they did not come in time, or the next epoch has begun.
        """
        deadline = time.monotonic() + timeout
        peers: list[socket.socket] = []
        with self._meeting:
            while len(peers) < world_size - 1:
                try:
                    if self._epoch != epoch:
                        raise InterruptedError("before the next epoch began")
                    if time.monotonic() > deadline:
                        raise InterruptedError(f"within {timeout:g} s")
                    peer, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # closed, too
                    for one in peers:
                        one.close()
                    raise RuntimeError(f"{len(peers)} of {world_size - 1} rollouts came {error}") from error
                shown = bytearray(len(secret))
                with suppress(OSError, EOFError):
                    receive(peer, memoryview(shown), min(deadline, time.monotonic() + SHOW_SECONDS))
                if hmac.compare_digest(bytes(shown), secret):
                    peer.settimeout(LOOK_SECONDS)
                    peers.append(peer)
                else:
                    peer.close()
        return SocketChannel(peers)

    def close(self) -> None:
        """Listen no more; whoever waits in `meet` is told."""
        with suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class SocketChannel:
    """One epoch's connections: `quartet_trainer.weight_sync.transports.Channel`."""

    def __init__(self, peers: list[socket.socket]):
        self._peers = peers

    def transfer(self, update) -> None:
        """Send every bucket to all. Raises what `update.check` does when the time is over or a rollout gone; OSError,
        which Quartet takes for a transfer that failed."""
        update.begin()
        for bucket in update.buckets():
            content = memoryview(bucket.numpy())
            for peer in self._peers:
                left = content
                while left:
                    update.check()
                    with suppress(TimeoutError):
                        left = left[peer.send(left) :]

    def drop(self, wait: float = 0.0) -> None:
        """Leave the epoch."""
        for peer in self._peers:
            peer.close()


class SocketReceiver:
    """The rollout's end: `quartet_rollout.weight_sync.transports.Transport`."""

    def __init__(self, info):
        """Connect as a member of `info`'s epoch. OSError is taken for a transfer that failed."""
        import torch

        self.device = torch.device("cpu")
        address = info.invitation["host"], int(info.invitation["port"])
        self._peer = socket.create_connection(address, info.timeout_seconds)
        self._peer.sendall(info.secret)

    def fill(self, manifest, buckets: Sequence, path: str, timeout_seconds: float, arrived: Callable) -> None:
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
        """Leave the group; whoever waits in `fill` is told."""
        with suppress(OSError):  # the other end was quicker
            self._peer.shutdown(socket.SHUT_RDWR)
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
