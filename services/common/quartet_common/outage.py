"""Retries of a peer that does not answer: when to call again, when to log, when to give up."""

import asyncio
import math
import time

FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 2.0
_LOG_SECONDS = 60.0


class Outage:
    """Measures how long a peer has not answered, and determines the pauses between calls to it: they double from
    `FIRST_RETRY_SECONDS` up to `LONGEST_RETRY_SECONDS`.

    An outage begins with the first failure, not with the call, and any answer ends it: a call or stream that waits for
    news over a healthy connection is no outage.

    Args:
        patience: seconds after which the peer is `given_up`.
    """

    def __init__(self, patience: float = math.inf):
        self.patience = patience
        self._pause = FIRST_RETRY_SECONDS
        self._failures = 0
        self._since: float | None = None
        self._logged = -math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the first failure; 0 while the peer answers."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def given_up(self) -> bool:
        """True if the outage has lasted for `patience` seconds."""
        return self._since is not None and self.seconds >= self.patience

    def over(self) -> bool:
        """Record that a call succeeded. Return True if calls before it failed."""
        failures, self._failures = self._failures, 0
        self._pause, self._since, self._logged = FIRST_RETRY_SECONDS, None, -math.inf
        return failures > 0

    def failed(self, suggested: float | None = None, answered: bool = False) -> float:
        """Record that a call failed. Return the seconds until the next one: at least what the server `suggested`.

        `answered`: the peer answered that the call should be retried, which ends the outage.
        """
        self._failures += 1
        if answered:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_RETRY_SECONDS)
        return max(pause, suggested or 0.0)

    async def wait(self, suggested: float | None = None) -> None:
        """Record that a call failed, and wait until the next one is due."""
        await asyncio.sleep(self.failed(suggested))

    def to_be_logged(self) -> bool:
        """Return True at the first failure, and then once a minute while the outage lasts."""
        now = time.monotonic()
        if now - self._logged < _LOG_SECONDS:
            return False
        self._logged = now
        return True
