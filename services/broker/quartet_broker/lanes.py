"""Those who wait for the same thing take turns: what one of them has just asked for in vain, the others need not.

A change wakes all who wait at the gate, and it mostly lets in one or two. With hundreds of rollouts each would ask
Redis at each change.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Lane:
    """Waiters of one run with the same weights: the gate says the same to all of them. Enter it while waiting."""

    def __init__(self, lanes: "Lanes", key: tuple[str, int]):
        self.in_vain = -1
        """How often the bell had rung (`Bell.rung`) when one of them last asked and got nothing."""
        self._lanes, self._key = lanes, key
        self._lock = asyncio.Lock()
        self._waiting = 0

    def __enter__(self) -> "Lane":
        self._waiting += 1
        return self

    def __exit__(self, *raised: object) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._lanes.leave(self._key)

    @asynccontextmanager
    async def turn(self, until: float) -> AsyncIterator[bool]:
        """Have the turn, waiting for it at most until `until` by the loop's clock; False if it did not come."""
        try:
            async with asyncio.timeout_at(until):
                await self._lock.acquire()
        except TimeoutError:
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()


class Lanes:
    """The lanes in which someone waits."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, int], Lane] = {}

    def lane(self, run_id: str, policy_version: int) -> Lane:
        """Return the lane of a run's waiters with weights of this version."""
        key = run_id, policy_version
        if key not in self._lanes:
            self._lanes[key] = Lane(self, key)
        return self._lanes[key]

    def leave(self, key: tuple[str, int]) -> None:
        """Forget a lane in which nobody waits any more."""
        self._lanes.pop(key, None)
