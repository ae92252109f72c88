"""The store at which the ranks of weight groups meet."""

import socket
import threading
from datetime import timedelta

import torch.distributed as dist

from quartet_common.config import ConfigError
from quartet_trainer.publisher.gate import StoreGate

# Making a group is a matter of a second; a rollout that takes longer is not well.
JOIN_SECONDS = 20.0
_TIMEOUT = timedelta(seconds=JOIN_SECONDS)


class WeightStore:
    """The stores of all epochs, one after another, at one address.

    An epoch's store is gated: in memory, reached through `StoreGate` alone. Only when a member is of a release that
    does not know the gate, it is an open TCPStore, whose keys begin with the secret, for as long as that epoch lasts.
    """

    def __init__(self, host: str, port: int = 0):
        """Listen at host:port; port 0 takes a free one.

        Raises:
            ConfigError: the address is not to be had.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            raise ConfigError(
                f"trainer.weights.store_host: cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}"
            ) from error
        self.host = host
        self.port: int = listener.getsockname()[1]
        self.gate = StoreGate(listener)
        self._lock = threading.Lock()
        self._present: tuple[int, bytes] | None = None
        self._over = -1
        self._gated: dist.Store | None = None
        self._open: dist.TCPStore | None = None

    def open(self, epoch: int, secret: bytes, gated: bool = True) -> None:
        """Begin an epoch, which ends the one before. `gated`: false while a member does not know the gate."""
        with self._lock:
            self._begin(epoch, secret, gated)

    def epoch(self, epoch: int, secret: bytes) -> dist.Store:
        """Return rank 0's end of an epoch's store; begin that epoch, gated, unless it has been.

        Raises:
            RuntimeError: that epoch is over.
        """
        with self._lock:
            if self._present != (epoch, secret):
                if epoch <= self._over or (self._present is not None and epoch <= self._present[0]):
                    raise RuntimeError(f"epoch {epoch} of the weight group is over")
                self._begin(epoch, secret, gated=True)
            if self._gated is not None:
                return self._gated
        # Its own connection, so that the server ends with the epoch, whoever still holds this.
        client = dist.TCPStore(self.host, self.port, is_master=False, timeout=_TIMEOUT)
        return dist.PrefixStore(f"quartet/{epoch}/{secret.hex()}", client)

    def end(self) -> None:
        """End the present epoch, if there is one: nobody gets at its store any more."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End the epoch and listen no more."""
        self.end()
        self.gate.close()

    def _begin(self, epoch: int, secret: bytes, gated: bool) -> None:
        self._end()
        if gated:
            self._gated = dist.HashStore()
            self._gated.set_timeout(_TIMEOUT)
            self.gate.open(epoch, secret, self._gated)
        else:
            # TCPStore by itself listens on all interfaces; given a socket it keeps to that, and owns it from here on.
            self._open = dist.TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=_TIMEOUT,
                master_listen_fd=self.gate.lend(),
            )
        self._present = (epoch, secret)

    def _end(self) -> None:
        if self._present is not None:
            self._over, self._present = self._present[0], None
        self._gated = None
        self.gate.shut()
        if self._open is not None:
            self._open = None  # its last reference: it closes its connections, and accepts no more
            self.gate.listen()
