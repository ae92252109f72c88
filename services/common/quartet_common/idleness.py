"""How much of the last minute a service had nothing to do."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

LOOK_SECONDS = 1.0
WINDOW_LOOKS = 60


class Idleness:
    """Looks once a second at how long the service was at work since the last look."""

    def __init__(self, busy_seconds: Callable[[], float] = lambda: 0.0):
        """Know when the service works.

        Args:
            busy_seconds: of all time, how long it had work under way outside of its process (workers, a sandbox). The
                processor time of its own process is known; the two may overlap, so the larger counts.
        """
        self._busy_seconds = busy_seconds
        self._shares: deque[float] = deque(maxlen=WINDOW_LOOKS)
        self._last = self._look()

    @property
    def fraction(self) -> float | None:
        """Share of the last minute without work, 0 to 1; None before the first second is over."""
        return 1 - sum(self._shares) / len(self._shares) if self._shares else None

    def look(self) -> None:
        """Take down what share of the time since the last look was work."""
        before, self._last = self._last, self._look()
        (at, *was), (now, *work) = before, self._last
        if now > at:
            done = max(end - begin for begin, end in zip(was, work, strict=True))
            self._shares.append(min(1.0, done / (now - at)))

    async def watch(self) -> None:
        """Look for as long as the service lives."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def _look(self) -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), self._busy_seconds()
