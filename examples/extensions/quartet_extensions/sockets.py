"""A transport of weights over plain TCP: the trainer's end and the rollout's. Standard library only.

Each rollout connects, sends the epoch's secret, and receives every bucket in order. A transport guarantees that buckets
arrive complete and in order, or an error is raised; that every wait has a deadline; that no model is changed.
"""

import hmac
import socket
import time
from collections.abc import Iterator, Sequence
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
        self._listener = socket.create_server((host, port))
        self._listener.settimeout(POLL_SECONDS)
        host, port = self._listener.getsockname()[:2]
        self.invitation = {"host": host, "port": str(port)}
        self._epoch, self._peers = -1, []

    def send(self, group, buckets) -> None:
        """Send every bucket to all rollouts, which are connected first if the epoch is new. `group.check` raises at the
        deadline or if a rollout has left; any error is a failed transfer."""
        if group.epoch != self._epoch:
            self._connect(group)
        for bucket in buckets:
            content = memoryview(bucket.numpy())
            for peer in self._peers:
                left = content
                while left:
                    group.check()
                    with suppress(TimeoutError):
                        left = left[peer.send(left) :]

    def _connect(self, group) -> None:
        """Wait for the rollouts of the group; connections without its secret are closed."""
        self._disconnect()
        while len(self._peers) < group.world_size - 1:
            group.check()
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            sent = bytearray(len(group.secret))
            with suppress(OSError, EOFError):
                receive(peer, memoryview(sent), time.monotonic() + SECRET_SECONDS)
            if hmac.compare_digest(bytes(sent), group.secret):
                peer.settimeout(POLL_SECONDS)
                self._peers.append(peer)
            else:
                peer.close()
        self._epoch = group.epoch

    def _disconnect(self) -> None:
        for peer in self._peers:
            peer.close()
        self._epoch, self._peers = -1, []

    def close(self) -> None:
        """Stop listening, and close the connections."""
        self._disconnect()
        self._listener.close()


class SocketReceiver:
    """The rollout's end; implements `quartet_rollout.weight_sync.receiver.Transport`."""

    def __init__(self, info):
        """Connect as a member of `info`'s epoch. OSError is treated as a failed transfer."""
        import torch

        self.device = torch.device("cpu")
        address = info.invitation["host"], int(info.invitation["port"])
        self._peer = socket.create_connection(address, info.timeout_seconds)
        self._peer.sendall(info.secret)

    def receive(self, manifest, buckets: Sequence, path: str, seconds: float) -> Iterator:
        """Fill and yield each bucket. Raises WeightTransferError at the deadline or on a lost connection."""
        deadline = time.monotonic() + seconds
        for bucket in buckets:
            try:
                receive(self._peer, memoryview(bucket.numpy()), deadline)
            except TimeoutError as error:
                raise failed(f"the weights did not come within {seconds:g} s") from error
            except (OSError, EOFError) as error:
                raise failed(f"the weights broke off: {error}") from error
            yield bucket

    def close(self) -> None:
        """Leave the group; a waiting `receive` raises."""
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
