"""The store at which the ranks of weight groups meet."""

import socket
from datetime import timedelta

import torch.distributed as dist

from quartet_common.config import ConfigError

# Making a group is a matter of a second; a rollout that takes longer is not well.
JOIN_SECONDS = 20.0


class WeightStore:
    """The TCPStore of all epochs, listening at one address only. Each epoch has its own secret prefix."""

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
        # TCPStore by itself listens on all interfaces; given a socket it keeps to that, and owns it from here on.
        self._store = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_SECONDS),
            master_listen_fd=listener.detach(),
        )

    def epoch(self, epoch: int, secret: bytes) -> dist.PrefixStore:
        """Return the part of the store that belongs to one group."""
        return dist.PrefixStore(f"quartet/{epoch}/{secret.hex()}", self._store)
