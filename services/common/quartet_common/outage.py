"""A peer that does not answer for a while: when to call again, when to log it, when to give up."""

import asyncio
import math
import time

_LOG_SECONDS = 60.0


class Outage:
    """The time since a peer answered last, and the pauses between calls to it.

    The time begins with the first failure, not with the call, and any answer ends it: a call or a stream that waits
    for news on a connection that stands is no outage.

    Args:
        patience: seconds after which the peer is `given_up`.
        first: seconds before the second call; the pauses double up to `longest`.
    """

    def __init__(self, patience: float = math.inf, first: float = 0.1, longest: float = 2.0):
        self.patience = patience
        self._first, self._longest = first, longest
        self._pause = first
        self._failures = 0
        self._since: float | None = None
        self._logged = -math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the first failure; 0 while the peer answers."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def given_up(self) -> bool:
        """True if the peer has been away for as long as `patience`."""
        return self._since is not None and self.seconds >= self.patience

    def over(self) -> bool:
        """A call succeeded. Return True if one had failed before."""
        failures, self._failures = self._failures, 0
        self._pause, self._since, self._logged = self._first, None, -math.inf
        return failures > 0

    def failed(self, suggested: float | None = None, answered: bool = False) -> float:
        """A call failed. Return the seconds to the next one: at least as many as the server suggested.

        `answered`: the peer is there and asks to be asked again.
        """
        self._failures += 1
        if answered:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return max(pause, suggested or 0.0)

    async def wait(self, suggested: float | None = None) -> None:
        """A call failed: wait until the next one."""
        await asyncio.sleep(self.failed(suggested))

    def to_be_logged(self) -> bool:
        """Return True at the first failure, and then once a minute while the outage lasts."""
        now = time.monotonic()
        if now - self._logged < _LOG_SECONDS:
            return False
        self._logged = now
        return True
