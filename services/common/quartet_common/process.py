"""The process of a service: its allocator keeps what was freed, its supervisor is told how it is."""

import asyncio
import ctypes
import os
import socket
import sys
from collections.abc import Mapping

from quartet_common.log import get_logger
from quartet_common.text import one_line

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Larger blocks are still taken from the system and given back: 32 MiB is the most that glibc allows here.
_MMAP_BYTES = 32 << 20
_TRIM_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory. Return False without glibc, or where MALLOC_* is set in the environment.

    glibc returns memory above 128 KiB to the system as soon as it is freed, and takes it anew for the next message,
    page by page: touching a fresh page costs several times what copying into it costs.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and library.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))


log = get_logger(__name__)

_MICROSECONDS = 1_000_000
_FEEDS_PER_LIMIT = 3


class Supervisor:
    """The service's supervisor, by sd_notify(3): systemd's protocol of one datagram a message.

    Outside systemd (`NOTIFY_SOCKET` unset) all of it does nothing. The watchdog is fed from the event loop, so a loop
    that is stuck is restarted, and one that merely waits is not.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        """Read `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`."""
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract socket.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_seconds = 0.0
        if environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            self._watchdog_seconds = int(environment.get("WATCHDOG_USEC", "0")) / _MICROSECONDS

    def tell(self, **facts: object) -> None:
        """Send facts, e.g. `tell(READY=1, STATUS="serving")`. A supervisor that cannot be told is only logged."""
        if not self._address:
            return
        message = "\n".join(one_line(f"{name}={value}") for name, value in facts.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning("cannot tell the supervisor %s: %s", facts, error)

    async def feed_watchdog(self) -> None:
        """Say that the event loop turns, until cancelled; returns at once where nobody watches."""
        if not self._address or self._watchdog_seconds <= 0:
            return
        while True:
            self.tell(WATCHDOG=1)
            await asyncio.sleep(self._watchdog_seconds / _FEEDS_PER_LIMIT)
