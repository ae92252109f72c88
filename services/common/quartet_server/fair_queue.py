"""Fair sharing of scarce resources, such as worker processes and sandbox slots, between runs.

The waiting run that has used the fewest seconds is served next, so a run with slow tasks gets as much as one with quick
tasks. Within a run the order is FIFO. A new run starts from the use of the runs that are served: it neither waits for
them nor is compensated for the time before it came. `Admission` bounds how many tasks are under way.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from prometheus_client import Gauge

T = TypeVar("T")

_MOST_RUNS = 4096
_SHARE_TO_FINISH = 0.7  # of the drain time, for work under way


@dataclass(eq=False, slots=True)
class Grant(Generic[T]):
    """Resources that a run holds."""

    resources: list[T]
    run: str
    began: float
    waited: float
    """Seconds from the request to the grant."""

    @property
    def resource(self) -> T:
        """The only resource of a grant of one."""
        return self.resources[0]


@dataclass(eq=False, slots=True)
class _Waiter(Generic[T]):
    granted: "asyncio.Future[Grant[T]]"
    count: int
    arrived: float


@dataclass(eq=False, slots=True)
class _Run(Generic[T]):
    ended: float
    """Seconds used by grants that were released."""
    held: int = 0
    """Resources that it holds now."""
    began: float = 0.0
    """Sum of the times at which it got each of them."""
    waiting: deque[_Waiter[T]] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        return not self.held and not self.waiting

    def used(self, now: float) -> float:
        """Return its seconds of use until now."""
        return self.ended + self.held * now - self.began


class RunQueue(Generic[T]):
    """A pool of resources that runs take turns at. For one event loop."""

    def __init__(
        self, waiting: Gauge, running: Gauge, closed: type[Exception], clock: Callable[[], float] = time.monotonic
    ):
        """
        Args:
            waiting: a metric of how many requests wait.
            running: of how many have resources.
            closed: raised once the queue is closed.
        """
        self._closed_error = closed
        self._clock = clock
        self._free: deque[T] = deque()
        self._runs: dict[str, _Run[T]] = {}
        self._floor = 0.0  # what the run served last had used: new runs start here
        self._closed = False
        self._waiting_gauge, self._running_gauge = waiting, running
        self.waiting = 0
        self.running = 0

    def add(self, *resources: T) -> None:
        """Add resources to the pool."""
        self._free.extend(resources)
        self._serve()

    async def acquire(self, run: str, timeout: float | None = None, count: int = 1) -> Grant[T]:
        """Wait for resources; `release` hands them back.

        Args:
            run: who asks.
            timeout: longest wait in seconds.
            count: how many, all at once; at most as many as the pool has. While they are collected, nobody overtakes.

        Raises:
            TimeoutError: the wait was longer than `timeout`.
            The exception given as `closed`.
        """
        if self._closed:
            raise self._closed_error()
        waiter: _Waiter[T] = _Waiter(asyncio.get_running_loop().create_future(), count, self._clock())
        self._run(run).waiting.append(waiter)
        self._count(waiting=1)
        self._serve()
        try:
            async with asyncio.timeout(timeout):
                return await waiter.granted
        except BaseException:
            self._abandon(run, waiter)
            raise

    def release(self, grant: Grant[T], reusable: bool = True) -> None:
        """Return a grant and charge its run for the time, once per resource.

        `reusable`: the resources go back to the pool; otherwise they are dropped.
        """
        run, count = self._runs[grant.run], len(grant.resources)
        run.ended += (self._clock() - grant.began) * count
        run.held -= count
        run.began -= grant.began * count
        self._count(running=-1)
        self._prune(grant.run)
        if reusable:
            self.add(*grant.resources)

    def close(self) -> None:
        self._closed = True
        for run in self._runs.values():
            for waiter in run.waiting:
                if not waiter.granted.done():
                    waiter.granted.set_exception(self._closed_error())

    def _run(self, name: str) -> _Run[T]:
        run = self._runs.get(name)
        if run is None:
            if len(self._runs) >= _MOST_RUNS:
                self._drop_idle()
            run = self._runs[name] = _Run(self._floor)
        elif run.idle:
            run.ended = max(run.ended, self._floor)
        return run

    def _serve(self) -> None:
        now = self._clock()
        while self._free and self.waiting and not self._closed:
            waiting = ((name, run) for name, run in self._runs.items() if run.waiting)
            name, run = min(waiting, key=lambda entry: entry[1].used(now))
            waiter = run.waiting[0]
            if not waiter.granted.done() and waiter.count > len(self._free):
                return
            run.waiting.popleft()
            if waiter.granted.done():  # cancelled, but its task has not run yet
                self._count(waiting=-1)
                continue
            self._floor = max(self._floor, run.used(now))
            run.held += waiter.count
            run.began += now * waiter.count
            # Moved to the end, so that runs with equal use alternate.
            self._runs[name] = self._runs.pop(name)
            self._count(waiting=-1, running=1)
            resources = [self._free.popleft() for _ in range(waiter.count)]
            waiter.granted.set_result(Grant(resources, name, now, now - waiter.arrived))

    def _abandon(self, name: str, waiter: _Waiter[T]) -> None:
        """Undo a wait that failed or was cancelled; release its grant if that came at the same moment."""
        granted = waiter.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self.release(granted.result())
            return
        run = self._runs.get(name)
        if run is not None and waiter in run.waiting:
            run.waiting.remove(waiter)
            self._count(waiting=-1)
        self._prune(name)
        self._serve()  # it may have blocked others by waiting for more resources than were free

    def _prune(self, name: str) -> None:
        """Forget use that no longer matters: all of it if no run is active; a run's if it used no more than others."""
        if not self.waiting and not self.running:
            self._runs.clear()
            self._floor = 0.0
        elif (run := self._runs.get(name)) is not None and run.idle and run.ended <= self._floor:
            del self._runs[name]

    def _drop_idle(self) -> None:
        idle = [name for name, run in self._runs.items() if run.idle]
        for name in idle[: len(idle) // 2 + 1]:
            del self._runs[name]

    def _count(self, waiting: int = 0, running: int = 0) -> None:
        self.waiting += waiting
        self.running += running
        self._waiting_gauge.set(self.waiting)
        self._running_gauge.set(self.running)


class Admission:
    """`size` places for items under way. A batch gets all its places or none; a stream waits for those of one item.

    A run gets a place only while more are free than it holds: one run alone fills half, two a third each.
    """

    def __init__(self, size: int):
        self._size = size
        self._taken = 0
        self._held: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._freed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._busy_since = 0.0
        self._busy_before = 0.0

    @property
    def free(self) -> int:
        return self._size - self._taken

    @property
    def busy_seconds(self) -> float:
        """Seconds, since the service began, during which any place was taken."""
        return self._busy_before + (time.monotonic() - self._busy_since if self._taken else 0.0)

    def free_for(self, run: str) -> int:
        return max(self.free - self._held[run], 0)

    def try_acquire(self, run: str, count: int) -> bool:
        """Take `count` places for `run` if as many are free for it."""
        if count > self.free_for(run):
            return False
        if self._taken == 0:
            self._busy_since = time.monotonic()
            self._empty.clear()
        self._taken += count
        self._held[run] += count
        return True

    def try_acquire_all(self, wanted: Mapping[str, int]) -> bool:
        """Take the places that each run wants, or none at all."""
        taken: list[str] = []
        for run, count in wanted.items():
            if not self.try_acquire(run, count):
                for other in taken:
                    self.release(other, wanted[other])
                return False
            taken.append(run)
        return True

    async def acquire(self, run: str, count: int = 1) -> None:
        """Wait for places for `run` and take them; FIFO within a run."""
        turn = self._turns.setdefault(run, asyncio.Lock())
        async with turn:
            while not self.try_acquire(run, count):
                await self._freed.wait()

    def release(self, run: str, count: int = 1) -> None:
        self._taken -= count
        self._held[run] -= count
        if not self._held[run]:
            del self._held[run]
        if not self._taken:
            self._busy_before += time.monotonic() - self._busy_since
            self._empty.set()
        self._freed.set()  # wakes those that wait now, and no others
        self._freed.clear()

    async def drain(self, seconds: float, give_up: Callable[[], Awaitable[None]]) -> None:
        """Wait until no place is taken. In the last of the `seconds`, `give_up` fails what is still under way."""
        try:
            async with asyncio.timeout(_SHARE_TO_FINISH * seconds):
                await self._empty.wait()
        except TimeoutError:
            await give_up()
            await self._empty.wait()
