"""Notices that the work of a service has hung: it is expected, and nothing of it is done for too long.

Each look takes a mark, a value that changes with every part of the work that is done, and compares it with the last.
How long it may stay the same is a key of the run file, by default `STEPS` times the slowest part seen so far, at least
`LEAST_SECONDS`.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

from quartet_common.metrics import Gauge

STEPS = 10.0
LEAST_SECONDS = 120.0
"""Longer than any one part of the work takes, also for a slow processor."""
LOOK_SECONDS = 0.2
"""Interval between two looks."""
_LONGEST_LOOK = 1.0
"""A look that comes later counts as this much: then this process stood still, and may not have read what came."""


class StallWatch(ABC):
    """Watches the work of a service, which a subclass knows."""

    def __init__(self, seconds: float | None, on_stall: Callable[[str], None], stalled: Gauge, limit: Gauge):
        """
        Args:
            seconds: how long the mark may stay the same; None: by the slowest part.
            on_stall: called once, with what is known.
            stalled, limit: the metrics for `stalled` and `limit`.
        """
        self._seconds, self._on_stall, self._gauges = seconds, on_stall, (stalled, limit)
        self._last: Hashable | None = None
        self._slowest = 0.0
        self.stalled = 0.0
        """Seconds since the last part of the work was done, while the next is expected."""

    @property
    def least(self) -> float:
        """The least limit by default."""
        return LEAST_SECONDS

    @property
    def limit(self) -> float:
        """How long the mark may stay the same."""
        return self._seconds or max(self.least, STEPS * self._slowest)

    @abstractmethod
    def look(self) -> Hashable | None:
        """Return the mark; None if nothing is expected now."""

    @abstractmethod
    def report(self) -> str:
        """Say what has hung, and for how long."""

    async def run(self) -> None:
        """Look until the work has stalled, or until cancelled."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            before, looked = looked, time.monotonic()
            stalled = self.observe(self.look(), looked - before)
            for gauge, value in zip(self._gauges, (self.stalled, self.limit), strict=True):
                gauge.set(value)
            if stalled:
                self._on_stall(self.report())
                return

    def observe(self, mark: Hashable | None, seconds: float) -> bool:
        """Take the mark, `seconds` after the last look. Return whether the work has stalled."""
        last, self._last = self._last, mark
        if mark is None or last is None:
            self.stalled = 0.0
            return False
        self.stalled += min(seconds, _LONGEST_LOOK)
        if mark != last:
            self._slowest, self.stalled = max(self._slowest, self.stalled), 0.0
        return self.stalled > self.limit
