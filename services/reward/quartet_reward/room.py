"""A bounded number of places for items under way."""

import asyncio
import time

_SHORTEST_WAIT, _LONGEST_WAIT = 0.1, 30.0


class Room:
    """`size` places. A batch takes all it needs or none; a stream waits for one."""

    def __init__(self, size: int):
        self._size = size
        self._taken = 0
        self._changed = asyncio.Event()
        self._given = 0
        self._busy_since = 0.0

    @property
    def free(self) -> int:
        """How many places are free."""
        return self._size - self._taken

    def try_take(self, count: int) -> bool:
        """Take `count` places if there are so many."""
        if count > self.free:
            return False
        if self._taken == 0:
            self._given, self._busy_since = 0, time.monotonic()
        self._taken += count
        return True

    async def take(self) -> None:
        """Wait for a place and take it."""
        while not self.try_take(1):
            self._changed.clear()
            await self._changed.wait()

    def give(self, count: int = 1) -> None:
        """Give places back."""
        self._taken -= count
        self._given += count
        self._changed.set()

    async def wait_empty(self) -> None:
        """Wait until no place is taken."""
        while self._taken:
            self._changed.clear()
            await self._changed.wait()

    def seconds_until(self, count: int) -> float:
        """Return about how long it takes until `count` places are free, by the pace since the room last was empty."""
        busy = time.monotonic() - self._busy_since
        wait = max(count - self.free, 0) * busy / self._given if self._given else 1.0
        return min(max(wait, _SHORTEST_WAIT), _LONGEST_WAIT)
