"""Notices an engine that has hung: completions wait in it, and no token comes.

Each look at `Engine.stats` compares it with the last one. How long nothing may change is `rollout.stall_seconds`, by
default `STEPS` times the slowest step seen so far, at least `LEAST_SECONDS`. Nothing is expected of an engine without
completions, nor while generation is paused for new weights or the engine sleeps.
"""

import asyncio
import time
from collections.abc import Callable

from quartet_rollout.engines.base import EngineStats
from quartet_rollout.metrics import STALL_LIMIT, STALLED
from quartet_rollout.state import RolloutState

STEPS = 10.0
LEAST_SECONDS = 120.0
"""Longer than the prompts of any one forward pass take to compute, also for a slow processor's first step."""
LOOK_SECONDS = 0.2
"""Interval between two looks."""
_LONGEST_LOOK = 1.0
"""A look that comes later counts as this much: then this process stood still, and may not have read what came."""


class StallWatch:
    """Watches the engine of a rollout."""

    def __init__(self, state: RolloutState, seconds: float | None, on_stall: Callable[[str], None]):
        """
        Args:
            seconds: how long no token may come; None: by the slowest step.
            on_stall: called once, with what is known: for how long no token came, and the limit.
        """
        self._state, self._seconds, self._on_stall = state, seconds, on_stall
        self._last: EngineStats | None = None
        self._slowest = 0.0
        self.stalled = 0.0
        """Seconds since the last step, while completions wait for the next."""

    @property
    def limit(self) -> float:
        """How long no token may come."""
        return self._seconds or max(LEAST_SECONDS, STEPS * self._slowest)

    async def run(self) -> None:
        """Look until the engine has stalled, or until cancelled."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            before, looked = looked, time.monotonic()
            stats = self._expected()
            stalled = self.observe(stats, looked - before)
            STALLED.set(self.stalled)
            STALL_LIMIT.set(self.limit)
            if stalled and stats is not None:
                waiting = stats.running + stats.waiting
                self._on_stall(
                    f"no token for {self.stalled:.1f} s with {waiting} completions under way "
                    f"(rollout.stall_seconds is {self.limit:g}); its prompts are given back and the rollout ends"
                )
                return

    def observe(self, stats: EngineStats | None, seconds: float) -> bool:
        """Take the engine's load, `seconds` after the last look; None if no step is expected. Return whether the engine
        has stalled."""
        last, self._last = self._last, stats
        if stats is None or last is None:
            self.stalled = 0.0
            return False
        self.stalled += min(seconds, _LONGEST_LOOK)
        if stats != last:
            self._slowest, self.stalled = max(self._slowest, self.stalled), 0.0
        return self.stalled > self.limit

    def _expected(self) -> EngineStats | None:
        """Return the load of an engine that should step now."""
        state = self._state
        if state.engine is None or state.paused or state.sleep_level:
            return None
        stats = state.engine.stats()
        return stats if stats.running + stats.waiting else None
