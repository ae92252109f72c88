"""Notices an engine that has hung: completions wait in it, and no token comes.

Nothing is expected of an engine while generation is paused for new weights or it sleeps.
"""

from collections.abc import Callable

from quartet_rollout.engines.base import EngineStats
from quartet_rollout.metrics import STALL_LIMIT, STALLED
from quartet_rollout.state import RolloutState
from quartet_server import stall


class StallWatch(stall.StallWatch):
    """Watches the engine of a rollout; the mark is its load."""

    def __init__(self, state: RolloutState, seconds: float | None, on_stall: Callable[[str], None]):
        super().__init__(seconds, on_stall, STALLED, STALL_LIMIT)
        self._state = state
        self._waiting = 0

    def look(self) -> EngineStats | None:
        state = self._state
        if state.engine is None or state.paused or state.sleep_level:
            return None
        stats = state.engine.stats()
        self._waiting = stats.running + stats.waiting
        return stats if self._waiting else None

    def report(self) -> str:
        return (
            f"no token for {self.stalled:.1f} s with {self._waiting} completions under way "
            f"(rollout.stall_seconds is {self.limit:g}); its prompts are given back and the rollout ends"
        )
