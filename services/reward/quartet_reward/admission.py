"""A bounded number of places for items under way, shared by runs so that one more always finds some.

A run may hold as many places as are free: one alone gets half of them, two a third each, n runs 1/(n + 1) each.
What is left over is what a run that comes anew finds, however long the others have been flooding. (Dynamic thresholds,
as in the shared buffers of network switches.)
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping

_SHORTEST_WAIT, _LONGEST_WAIT = 0.1, 30.0


class Admission:
    """`size` places. A batch takes all it needs or none; a stream waits for those of one item."""

    def __init__(self, size: int):
        self._size = size
        self._taken = 0
        self._held: Counter[str] = Counter()
        self._waiting: deque[tuple[str, int, asyncio.Future[None]]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()
        self._given = 0
        self._busy_since = 0.0
        self._busy_before = 0.0

    @property
    def free(self) -> int:
        """How many places are free."""
        return self._size - self._taken

    @property
    def busy_seconds(self) -> float:
        """How long, since the service began, any place was taken."""
        return self._busy_before + (time.monotonic() - self._busy_since if self._taken else 0.0)

    def free_for(self, run: str) -> int:
        """How many places `run` may take now."""
        return max(self.free - self._held[run], 0)

    def try_take(self, run: str, count: int) -> bool:
        """Take `count` places for `run` if it may have so many."""
        if count > self.free_for(run):
            return False
        if not count:
            return True
        if self._taken == 0:
            self._given, self._busy_since = 0, time.monotonic()
            self._empty.clear()
        self._taken += count
        self._held[run] += count
        return True

    def try_take_all(self, wanted: Mapping[str, int]) -> bool:
        """Take for each run the places that it wants, or none at all."""
        taken: list[str] = []
        for run, count in wanted.items():
            if not self.try_take(run, count):
                for other in taken:
                    self.give(other, wanted[other])
                return False
            taken.append(run)
        return True

    async def take(self, run: str, count: int = 1) -> None:
        """Wait for places for `run` and take them. Those of one run are served in the order in which they came."""
        if not any(waiting == run for waiting, _, _ in self._waiting) and self.try_take(run, count):
            return
        entry = (run, count, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[2]
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not entry[2].cancelled():
                self.give(run, count)
            raise

    def give(self, run: str, count: int = 1) -> None:
        """Give places of `run` back."""
        if not count:
            return
        self._taken -= count
        self._given += count
        self._held[run] -= count
        if not self._held[run]:
            del self._held[run]
        if not self._taken:
            self._busy_before += time.monotonic() - self._busy_since
            self._empty.set()
        self._serve()

    async def wait_empty(self) -> None:
        """Wait until no place is taken."""
        await self._empty.wait()

    def seconds_until(self, run: str, count: int) -> float:
        """Return about how long it takes until `run` may take `count` places, by the pace since all were free."""
        busy = time.monotonic() - self._busy_since
        wait = max(count - self.free_for(run), 0) * busy / self._given if self._given else 1.0
        return min(max(wait, _SHORTEST_WAIT), _LONGEST_WAIT)

    def _serve(self) -> None:
        """Let in who waits longest among those who may; whoever may not keeps its place in the line."""
        stay: deque[tuple[str, int, asyncio.Future[None]]] = deque()
        behind: set[str] = set()  # a run's later items do not pass its larger one
        for entry in self._waiting:
            run, count, admitted = entry
            if admitted.done():  # given up; its task has not yet had the time to say so
                continue
            if run not in behind and self.try_take(run, count):
                admitted.set_result(None)
            else:
                behind.add(run)
                stay.append(entry)
        self._waiting = stay
