"""Notices work that has hung: its mark, a value that changes with every part that is done, stays the same too long."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

from quartet_server.metrics import Gauge

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
            seconds: how long nothing may be done; None: `STEPS` times the slowest part so far, or `LEAST_SECONDS`.
            on_stall: called once, with what is known.
            stalled, limit: the metrics for `stalled` and `limit`.
        """
        self._seconds, self._on_stall, self._gauges = seconds, on_stall, (stalled, limit)
        self._last: Hashable | None = None
        self._slowest = 0.0
        self.stalled = 0.0
        """Seconds since the last part of the work was done, while the next is expected."""

    @property
    def limit(self) -> float:
        """How long nothing may be done."""
        return self._seconds or max(LEAST_SECONDS, STEPS * self._slowest)

    @abstractmethod
    def look(self) -> Hashable | None:
        """Return the mark; None if nothing is expected now."""

    @abstractmethod
    def report(self) -> str:
        """Say what has hung, and for how long."""

    async def run(self) -> None:
        """Look until the work has stalled, or until cancelled."""
        stalled, looked = False, time.monotonic()
        while not stalled:
            await asyncio.sleep(LOOK_SECONDS)
            before, looked = looked, time.monotonic()
            stalled = self.observe(self.look(), looked - before)
            for gauge, value in zip(self._gauges, (self.stalled, self.limit), strict=True):
                gauge.set(value)
        self._on_stall(self.report())

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
