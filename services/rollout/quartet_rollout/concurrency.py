"""How many completions the engine may be given at once: the window.

How much of the KV cache a completion needs is known only at its end, so the window follows the use of the cache, like
TCP's congestion window. When the cache is full and completions wait in the engine, it shrinks to the number that run.
When the whole window runs and the cache has room to spare, it grows by an eighth each time half of it has finished.
"""

from quartet_rollout.engines.base import EngineStats

_GROWTH = 8
_SPARE = 0.1
"""The cache has room to spare while its use is this far below the limit."""


class Concurrency:
    """The window: how many completions the engine may be given at once."""

    def __init__(self, most: int, kv_cache_limit: float):
        """The window begins at `most`, and stays there if the engine reports no KV cache."""
        self._most, self._limit = most, kv_cache_limit
        self.window = most
        self._finished = 0
        self._next_growth = 0

    def finished(self, completions: int) -> None:
        """Count completions that have left the engine."""
        self._finished += completions

    def observe(self, stats: EngineStats, generating: int, least: int) -> int:
        """Adjust the window to the engine's load; return it.

        Args:
            generating: completions given to the engine that have not ended.
            least: the smallest window, e.g. a group.
        """
        least = min(least, self._most)
        if stats.kv_cache_use > self._limit and stats.waiting > 0:
            if stats.running < self.window:
                self._set(max(stats.running, least))
        elif (
            self.window < self._most
            and 0 <= stats.kv_cache_use < self._limit - _SPARE
            and stats.waiting == 0
            and generating > self.window - least
            and self._finished >= self._next_growth
        ):
            self._set(min(self._most, self.window + max(least, self.window // _GROWTH)))
        return self.window

    def _set(self, window: int) -> None:
        self.window = window
        self._next_growth = self._finished + window // 2
