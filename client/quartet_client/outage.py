"""A service that is away for a while, because it is restarted or not started yet, and how long to wait for it."""

import asyncio

from quartet_client.errors import QuartetError
from quartet_common.errors import AWAY

_PAUSE = 0.5  # seconds between tries, where the service suggests none


class Outage:
    """Decides whether a call that failed is made again.

    Args:
        patience: seconds without any success after which an outage is an error.
        stop: set it to wait no longer.
    """

    def __init__(self, patience: float, stop: asyncio.Event | None = None) -> None:
        self._patience = patience
        self._stop = stop or asyncio.Event()
        self._since: float | None = None

    def over(self) -> None:
        """Something came: the next outage is another one."""
        self._since = None

    async def ride_out(self, error: QuartetError) -> None:
        """Return when the call should be made again; raise the error if that is of no use."""
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        if error.code not in AWAY or now - self._since >= self._patience:
            raise error
        await wait_for(self._stop, error.retry_after or _PAUSE)


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, or `seconds` have passed. Return True if it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
