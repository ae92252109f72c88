"""A transport of weights over plain TCP: the trainer's end and the rollout's. Standard library only.

Each rollout connects, sends the epoch's secret, and receives every bucket in order. A transport guarantees that buckets
arrive complete and in order, or an error is raised; that every wait has a deadline; that no model is changed.
"""

import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from pydantic import Field

from quartet_server.transports import TransportParameters

POLL_SECONDS = 0.1
SECRET_SECONDS = 2.0  # for a rollout to send the secret


class SocketsParameters(TransportParameters):
    """The keys of [trainer.weights.transport_parameters]."""

    port: int = Field(0, ge=0, le=65535, description="Port at which the trainer listens; 0: any free one.")


class Sockets:
    """The factory of both ends, which the entry point names. It imports torch late: every start imports this module."""

    name = "sockets"
    description = "Weights over plain TCP, one connection for each rollout."
    parameters = SocketsParameters

    def trainer_end(self, parameters, host, folder):
        """Return the sending end; called by the trainer."""
        return SocketSender(host, parameters.port)

    def rollout_end(self, info):
        """Return the connected receiving end; called by a rollout."""
        return SocketReceiver(info)


class SocketSender:
    """The trainer's end; implements `quartet_trainer.weight_sync.transports.Transport`."""

    def __init__(self, host: str, port: int = 0):
        """Listen at an address. Raises OSError."""
        import torch

        self.device = torch.device("cpu")
        self.libraries: dict[str, str] = {}
        self._epoch, self._listener = -1, socket.create_server((host, port))
        self._listener.settimeout(POLL_SECONDS)
        self._address = self._listener.getsockname()
        self._meeting = threading.Lock()

    def invite(self, epoch: int) -> dict[str, str]:
        """Return the address for rollouts, once an abandoned `meet`, which would reject them, has ended."""
        self._epoch = epoch
        with self._meeting:
            return {"host": self._address[0], "port": str(self._address[1])}

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> "SocketChannel":
        """Wait for the rollouts of an epoch; connections without its secret are closed.

        Raises:
            RuntimeError: not all connected in time, or the next epoch has begun.
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
                except OSError as error:  # also if `close` was called
                    for one in peers:
                        one.close()
                    raise RuntimeError(f"{len(peers)} of {world_size - 1} rollouts came {error}") from error
                sent = bytearray(len(secret))
                with suppress(OSError, EOFError):
                    receive(peer, memoryview(sent), min(deadline, time.monotonic() + SECRET_SECONDS))
                if hmac.compare_digest(bytes(sent), secret):
                    peer.settimeout(POLL_SECONDS)
                    peers.append(peer)
                else:
                    peer.close()
        return SocketChannel(peers)

    def close(self) -> None:
        """Stop listening; a waiting `meet` raises."""
        with suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class SocketChannel:
    """One epoch's connections; implements `quartet_trainer.weight_sync.transports.Channel`."""

    def __init__(self, peers: list[socket.socket]):
        self._peers = peers

    def transfer(self, update) -> None:
        """Send every bucket to all rollouts. `update.check` raises at the deadline or if a rollout has left; OSError is
        treated as a failed transfer."""
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
    """The rollout's end; implements `quartet_rollout.weight_sync.transports.Transport`."""

    def __init__(self, info):
        """Connect as a member of `info`'s epoch. OSError is treated as a failed transfer."""
        import torch

        self.device = torch.device("cpu")
        address = info.invitation["host"], int(info.invitation["port"])
        self._peer = socket.create_connection(address, info.timeout_seconds)
        self._peer.sendall(info.secret)

    def fill(self, manifest, buckets: Sequence, path: str, timeout_seconds: float, arrived: Callable) -> None:
        """Fill each bucket and call `arrived`. Raises WeightTransferError at the deadline or on a lost connection."""
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
        """Leave the group; a waiting `fill` raises."""
        with suppress(OSError):  # the other end has closed
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
    """Return the error of a failed transfer."""
    from quartet_rollout.engines.base import WeightTransferError

    return WeightTransferError(sentence)
