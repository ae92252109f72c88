"""The store at which the ranks of weight groups meet."""

import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from quartet_common.config import ConfigError
from quartet_weights.process_group import epoch_store

# Making a group is a matter of a second; a rollout that takes longer is not well.
JOIN_SECONDS = 20.0
_TIMEOUT = timedelta(seconds=JOIN_SECONDS)


def interface_address(name: str) -> str:
    """Return the first IPv4 address of a network interface, else its first of IPv6. Raises ConfigError without one."""
    addresses = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in addresses:
            if each.family == family:
                return each.address
    raise ConfigError(f"trainer.weights.interface: '{name}' has no address; give it one, or set store_host")


class WeightStore:
    """A TCPStore for all epochs, at one address. Each epoch's keys begin with its secret, which the invited have."""

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
        # Its own connection: who waits there holds up nobody else.
        return epoch_store(dist.TCPStore(self.host, self.port, is_master=False, timeout=_TIMEOUT), epoch, secret)

    def close(self) -> None:
        """Listen no more."""
        self._server = None  # Its last reference: it closes its connections.
