"""A broker that is away for a while, because it is restarted or not started yet, and how long to wait for it."""

import asyncio

from quartet_client.errors import QuartetError
from quartet_common import outage
from quartet_common.errors import AWAY


class Outage(outage.Outage):
    """Decides whether a call that failed is made again.

    Args:
        patience: seconds without any answer after which an outage is an error.
        what: what was being done, for that error.
        stop: set it to wait no longer.
    """

    def __init__(self, patience: float, what: str, stop: asyncio.Event | None = None) -> None:
        super().__init__(patience, first=0.5)
        self._what = what
        self._stop = stop or asyncio.Event()

    async def ride_out(self, error: QuartetError) -> None:
        """Return when the call should be made again; raise QuartetError if that is of no use."""
        if error.code not in AWAY:
            raise error
        pause = self.failed(error.retry_after)
        if self.given_up:
            waited = f" (away for {self.seconds:.0f} s)" if self.patience else ""
            text = f"{self._what}: {error}{waited}"
            raise QuartetError(text, error.code, error.retry_after) from error
        await wait_for(self._stop, pause)


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, or `seconds` have passed. Return True if it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
