"""How many completions to give the engine at once: as many as its KV cache holds, found by watching it.

How much of the cache a completion will need is known when it has ended, not before; prompts are shared, lengths change
as the policy learns. So the number is not computed but followed (additive increase, multiplicative decrease, as TCP
does with a path of unknown width). While completions wait inside the engine although its cache is full, the window is
what runs at that moment, as that is what fits; while the whole window runs and the cache has room to spare, it grows by
an eighth for every half of it that has finished.
"""

from quartet_rollout.engines.base import EngineStats

_GROWTH = 8
_SPARE = 0.1
"""The cache has room to spare while its use is that much below the limit."""


class Concurrency:
    """The window, in completions."""

    def __init__(self, most: int, kv_cache_limit: float):
        """Begins with `most`: an engine that has no KV cache to report gets that many for ever."""
        self._most, self._limit = most, kv_cache_limit
        self.window = most
        self._finished = 0
        self._next_growth = 0

    def finished(self, completions: int) -> None:
        """So many completions have left the engine."""
        self._finished += completions

    def observe(self, stats: EngineStats, generating: int, least: int) -> int:
        """Take note of what the engine does; return the window.

        Args:
            generating: completions that were given to it and have not ended.
            least: the window is never smaller, e.g. a group.
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
