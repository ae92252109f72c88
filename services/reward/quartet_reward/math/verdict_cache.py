"""What was decided lately, bounded by the bytes that it takes; one question is worked on once for all who ask it."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

from quartet_reward import metrics
from quartet_reward.queue import CURRENT_RUN

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Of an entry beside its text: dictionary, key, value.
_OVERHEAD_BYTES = 600


class VerdictCache(Generic[K, V]):
    """Verdicts by question, the least lately used dropped first."""

    def __init__(self, name: str, most_bytes: int):
        """`name` is the label `cache` of the metrics; 0 bytes keep nothing."""
        self._most = most_bytes
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._under_way: dict[Hashable, asyncio.Task[V]] = {}
        self._asking: dict[Hashable, int] = {}
        self._gauge = metrics.CACHE_BYTES.labels(name)
        self._hits = metrics.CACHE_LOOKUPS.labels(name, "hit")
        self._shared = metrics.CACHE_LOOKUPS.labels(name, "shared")
        self._misses = metrics.CACHE_LOOKUPS.labels(name, "miss")
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, question: K) -> V | None:
        """Return the verdict that is kept, if there is one."""
        found = self._kept.get(question)
        if found is None:
            return None
        with suppress(KeyError):  # dropped by another thread just now
            self._kept.move_to_end(question)
        self._hits.inc()
        return found[0]

    def put(self, question: K, verdict: V, characters: int) -> None:
        """Keep a verdict; `characters` is the length of all its text and its question's."""
        size = 2 * characters + _OVERHEAD_BYTES
        self._drop(question)
        if size <= self._most:
            self._kept[question] = (verdict, size)
            self.bytes += size
            while self.bytes > self._most:
                self._drop(next(iter(self._kept)))
        self._gauge.set(self.bytes)

    async def ask(self, asked: K, work: Callable[[], Awaitable[V]]) -> V:
        """Have a question decided by `work`, together with others of the run who ask it now. Raises what that raises.

        The work is cancelled when the last who asked is.
        """
        question = asked, CURRENT_RUN.get()  # another run has its own place in the queue, perhaps far behind
        task = self._under_way.get(question)
        if task is None:
            self._misses.inc()
            task = self._under_way[question] = asyncio.create_task(_run(work))
            task.add_done_callback(lambda ended: self._ended(question, ended))
        else:
            self._shared.inc()
        self._asking[question] = self._asking.get(question, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            left = self._asking[question] - 1
            if left:
                self._asking[question] = left
            else:
                del self._asking[question]
                if not task.done():
                    # Gone from here at once, so that who asks next does not wait for what is being cancelled.
                    self._ended(question, task)
                    task.cancel()

    def _ended(self, question: Hashable, task: "asyncio.Task[V]") -> None:
        if self._under_way.get(question) is task:
            del self._under_way[question]
        if task.done() and not task.cancelled():
            task.exception()  # whoever asked has it

    def _drop(self, question: K) -> None:
        found = self._kept.pop(question, None)
        if found is not None:
            self.bytes -= found[1]


async def _run(work: Callable[[], Awaitable[V]]) -> V:
    return await work()
