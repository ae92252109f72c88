"""The process of a service: how its allocator treats freed memory, and notifications to its supervisor."""

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

    By default glibc returns blocks above 128 KiB to the system when they are freed, and allocates fresh pages for the
    next message: the page faults cost several times what copying the message costs.
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


class SystemdNotifier:
    """Notifies systemd of the service's state, by sd_notify(3): one datagram per message.

    Without systemd (`NOTIFY_SOCKET` is unset) all methods do nothing. The event loop feeds the watchdog, so systemd
    restarts a service whose loop is stuck, but not one that waits.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        """Read `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`."""
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract socket.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_seconds = 0.0
        if environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            self._watchdog_seconds = int(environment.get("WATCHDOG_USEC", "0")) / _MICROSECONDS

    def notify(self, **facts: object) -> None:
        """Send facts, e.g. `notify(READY=1, STATUS="serving")`. A failure to send is only logged."""
        if not self._address:
            return
        message = "\n".join(one_line(f"{name}={value}") for name, value in facts.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning("cannot notify the supervisor %s: %s", facts, error)

    async def feed_watchdog(self) -> None:
        """Feed the watchdog until cancelled; return at once if there is none."""
        if not self._address or self._watchdog_seconds <= 0:
            return
        while True:
            self.notify(WATCHDOG=1)
            await asyncio.sleep(self._watchdog_seconds / _FEEDS_PER_LIMIT)
