"""Who may use the engine directly, and when: a bounded queue, and a fair share beside the run's own prompts.

The engine's window (concurrency.py) is shared. Direct requests may have `share` of it whatever the run wants, and,
while the run has no prompts to fill it with, all that is free. The run's prompts get the rest: while somebody waits
here, fewer prompts are leased, so that the share becomes free as completions end. Nothing that runs is taken away.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quartet_common.errors import resource_exhausted, unavailable
from quartet_rollout.state import Changes

_SHORTEST_RETRY, _LONGEST_RETRY = 0.5, 30.0
_MEMORY = 0.2
"""Weight of the newest request in the mean time that one takes."""


class Admission:
    """Lets direct requests in, in the order in which they come."""

    def __init__(
        self,
        changes: Changes,
        most: int,
        queue: int,
        share: float,
        window: Callable[[], int],
        generating: Callable[[], int],
        run_wants: Callable[[], bool],
    ):
        """
        Args:
            most: completions at once.
            queue: completions that may wait.
            share: of the window, in (0, 1].
            window: completions that the engine may have in all.
            generating: those that it has of the run's own prompts.
            run_wants: whether the run has more prompts than it may give to the engine now.
        """
        self._changes, self._most, self._queue_limit, self._share = changes, most, queue, share
        self._window, self._generating, self._run_wants = window, generating, run_wants
        self._queue: deque[int] = deque()
        self.running = 0
        """Completions under way."""
        self._seconds = 1.0
        self._closed = ""

    def close(self, reason: str) -> None:
        """Let nobody in any more, for this reason: who waits is refused at once, and so is whoever comes."""
        self._closed = reason
        self._changes.notify()

    @property
    def waiting(self) -> int:
        """Completions that wait to be let in."""
        return sum(self._queue)

    @property
    def reserved(self) -> int:
        """Completions of the window that the run's own prompts must leave free now."""
        return min(self.running + self.waiting, self._most, max(1, int(self._share * self._window())))

    @asynccontextmanager
    async def entered(self, completions: int) -> AsyncIterator[None]:
        """Wait for room, and hold it.

        Raises RESOURCE_EXHAUSTED, with a time to come again, when the queue is full; UNAVAILABLE after `close`.
        Whoever gives up while it waits (its deadline has passed, its caller has gone) loses its place, nothing else.
        """
        await self._enter(completions)
        self.running += completions
        self._changes.notify()
        began = time.monotonic()
        try:
            yield
        finally:
            self.running -= completions
            self._seconds += _MEMORY * (time.monotonic() - began - self._seconds)
            self._changes.notify()

    async def _enter(self, completions: int) -> None:
        self._check_open()
        if completions > self._most:
            raise resource_exhausted(
                "max_direct_completions", f"{completions} completions were asked for; allowed: {self._most}"
            )
        if not self._queue and self._fits(completions):
            return
        if self.waiting + completions > self._queue_limit:
            raise resource_exhausted(
                "max_direct_queued",
                f"{self.running} completions are under way, {self.waiting} wait and {completions} more were asked for; "
                f"allowed to wait: {self._queue_limit}",
                retry_after_seconds=self._retry_after(),
            )
        ticket = _Ticket(completions)
        self._queue.append(ticket)
        self._changes.notify()
        try:
            while self._queue[0] is not ticket or not self._fits(completions):
                await self._changes.wait()
                self._check_open()
        finally:
            self._queue.remove(ticket)
            self._changes.notify()

    def _check_open(self) -> None:
        if self._closed:
            raise unavailable("rollout", self._closed)

    def _fits(self, completions: int) -> bool:
        if not self.running:
            return True  # One request at least is always served, however large the groups of the run.
        after = self.running + completions
        window = self._window()
        if after > self._most:
            return False
        return after <= self._share * window or (not self._run_wants() and after + self._generating() <= window)

    def _retry_after(self) -> float:
        """Return the time until all that is under way or waits has been served, at the pace of late."""
        rounds = (self.running + self.waiting) / max(1, self.running)
        return min(_LONGEST_RETRY, max(_SHORTEST_RETRY, self._seconds * rounds))


class _Ticket(int):
    """A place in the queue, for so many completions; equal only to itself."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
