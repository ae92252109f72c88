"""Queues of calls that wait for the same thing: waiters are woken in FIFO order, one per change.

A change mostly admits one or two. If it woke all waiters, then with hundreds of rollouts each change would cost
hundreds of wakings, and as many queries to Redis.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from quartet.v1 import broker_pb2

from quartet_broker.notifier import Notifier, Waiter


class WaitQueue:
    """The queue of a run's rollouts with the same weights: admission is the same for all. Enter it to wait in it."""

    def __init__(self, queues: "WaitQueues", key: tuple[str, int]):
        self.refusal: broker_pb2.LeasePromptsResponse | None = None
        """The last response that granted nothing."""
        self._queues, self._key = queues, key
        self._first = asyncio.Lock()  # FIFO
        self._size = 0
        self._registration = ExitStack()
        self._waiter: Waiter

    def __enter__(self) -> "WaitQueue":
        if not self._size:
            self._waiter = self._registration.enter_context(self._queues.notifier.waiter(self._key[0], "prompts"))
            self._waiter.notify()  # nobody has queried yet
        self._size += 1
        return self

    def __exit__(self, *raised: object) -> None:
        self._size -= 1
        if not self._size:
            self._registration.close()
            self._queues.remove(self._key)

    @property
    def is_empty(self) -> bool:
        """True if no call is first."""
        return not self._first.locked()

    @asynccontextmanager
    async def first(self, until: float) -> AsyncIterator[bool]:
        """Become the first, waiting at most until `until` by the loop's clock; yield False if it is not."""
        try:
            async with asyncio.timeout_at(until):
                await self._first.acquire()
        except TimeoutError:
            yield False
            return
        try:
            yield True
        finally:
            self._first.release()

    async def changed(self, until: float) -> bool:
        """Wait for a change since the last `clear`. Return False when the time is up."""
        return await self._waiter.wait(until)

    def clear(self) -> None:
        """Forget earlier changes: the caller is about to query."""
        self._waiter.clear()

    def notify_next(self) -> None:
        """Have the next in the queue query, too."""
        self._waiter.notify()


class WaitQueues:
    """The queues in which calls wait."""

    def __init__(self, notifier: Notifier) -> None:
        self.notifier = notifier
        self._queues: dict[tuple[str, int], WaitQueue] = {}

    def queue(self, run_id: str, policy_version: int) -> WaitQueue:
        """Return the queue of a run's rollouts with weights of this version."""
        key = run_id, policy_version
        if key not in self._queues:
            self._queues[key] = WaitQueue(self, key)
        return self._queues[key]

    def remove(self, key: tuple[str, int]) -> None:
        """Remove an empty queue."""
        self._queues.pop(key, None)
