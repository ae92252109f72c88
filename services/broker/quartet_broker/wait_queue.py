"""Those who wait for the same thing stand in line: a change wakes the first, who lets the next one have a look.

A change mostly lets in one or two. If it woke all, then with hundreds of rollouts each change would cost hundreds of
wakings, and as many questions to Redis.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from quartet.v1 import broker_pb2

from quartet_broker.notifier import Notifier, Waiter


class WaitQueue:
    """The line of a run's rollouts with the same weights: the gate says the same to all. Enter it to stand in it."""

    def __init__(self, lanes: "WaitQueues", key: tuple[str, int]):
        self.refusal: broker_pb2.LeasePromptsResponse | None = None
        """What the gate said last, when it granted nothing."""
        self._queues, self._key = lanes, key
        self._first = asyncio.Lock()  # goes to those who wait for it in the order in which they came
        self._standing = 0
        self._notifier = ExitStack()
        self._waiter: Waiter

    def __enter__(self) -> "WaitQueue":
        if not self._standing:
            self._waiter = self._notifier.enter_context(self._queues.bell.waiter(self._key[0], "prompts"))
            self._waiter.notify()  # nobody has looked yet
        self._standing += 1
        return self

    def __exit__(self, *raised: object) -> None:
        self._standing -= 1
        if not self._standing:
            self._notifier.close()
            self._queues.leave(self._key)

    @property
    def is_empty(self) -> bool:
        """True if nobody is first."""
        return not self._first.locked()

    @asynccontextmanager
    async def first(self, until: float) -> AsyncIterator[bool]:
        """Be the first, waiting for that at most until `until` by the loop's clock; False if it did not come to it."""
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

    async def change(self, until: float) -> bool:
        """Wait until the first has reason to look: something changed since the last refusal. False: time is up."""
        return await self._waiter.wait(until)

    def look(self) -> None:
        """Say before looking that what changed until now will be seen."""
        self._waiter.clear()

    def pass_on(self) -> None:
        """Say that the next one has reason to look, too."""
        self._waiter.notify()


class WaitQueues:
    """The lanes in which someone stands."""

    def __init__(self, notifier: Notifier) -> None:
        self.notifier = notifier
        self._queues: dict[tuple[str, int], WaitQueue] = {}

    def lane(self, run_id: str, policy_version: int) -> WaitQueue:
        """Return the lane of a run's rollouts with weights of this version."""
        key = run_id, policy_version
        if key not in self._queues:
            self._queues[key] = WaitQueue(self, key)
        return self._queues[key]

    def leave(self, key: tuple[str, int]) -> None:
        """Forget a lane in which nobody stands any more."""
        self._queues.pop(key, None)
