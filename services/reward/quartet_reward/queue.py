"""What many want and few can have at one time (worker processes, sandbox slots), shared fairly between runs.

Of the runs that wait, the one that has used least goes next; use is counted in seconds, so a run whose tasks are slow
gets as much as one whose tasks are quick. Within a run, first come, first served. A run that comes anew starts with
what those that are served have used: it neither waits for them nor catches up on what it did not want. How many may
wait is bounded where items enter the service (`admission`).
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from quartet_reward import metrics
from quartet_reward.errors import ShuttingDown

T = TypeVar("T")

CURRENT_RUN: ContextVar[str] = ContextVar("quartet_reward_run", default="")
"""The run whose item the current task scores; the scorer sets it, so that no verifier has to hand it on."""

WAITED: ContextVar[list[float] | None] = ContextVar("quartet_reward_waited", default=None)
"""One number, the seconds that the current task waited; the scorer sets it."""

_MOST_RUNS = 4096


def count_wait(seconds: float) -> None:
    """Count seconds that the current task waited for others, which are no part of its verification."""
    if (waited := WAITED.get()) is not None:
        waited[0] += seconds


@dataclass(eq=False, slots=True)
class Grant(Generic[T]):
    """Things that are held, and by whom."""

    things: list[T]
    run: str
    began: float

    @property
    def thing(self) -> T:
        """The one thing of a grant of one."""
        return self.things[0]


@dataclass(eq=False, slots=True)
class _Waiter(Generic[T]):
    granted: "asyncio.Future[Grant[T]]"
    count: int
    arrived: float


@dataclass(eq=False, slots=True)
class _Run(Generic[T]):
    ended: float
    """Seconds of use that has ended."""
    held: int = 0
    """Things that its running tasks hold."""
    began: float = 0.0
    """Sum of the times at which it got each of them."""
    waiting: deque[_Waiter[T]] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        return not self.held and not self.waiting

    def used(self, now: float) -> float:
        """Return its seconds of use until now."""
        return self.ended + self.held * now - self.began


class FairQueue(Generic[T]):
    """Things on one side, runs that wait for them on the other. For one event loop."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        """`name` is the label `queue` of the metrics."""
        self._clock = clock
        self._things: deque[T] = deque()
        self._runs: dict[str, _Run[T]] = {}
        self._floor = 0.0  # what the run served last had used: where newcomers start
        self._closed = False
        self._waiting_gauge = metrics.QUEUE_DEPTH.labels(name, "waiting")
        self._running_gauge = metrics.QUEUE_DEPTH.labels(name, "running")
        self.waiting = 0
        self.running = 0

    def offer(self, *things: T) -> None:
        """Hand things over: they go to whoever's turn it is, or are kept until somebody comes."""
        self._things.extend(things)
        self._serve()

    async def take(self, run: str | None = None, timeout: float | None = None, count: int = 1) -> Grant[T]:
        """Wait for things; hand them back by `settle`.

        Args:
            run: who wants them; by default the run of the current task's item.
            timeout: longest wait in seconds.
            count: how many, together or not at all; no more than there are. Nobody passes by whose turn it is.

        Raises:
            TimeoutError: they were not to be had in time.
            ShuttingDown: the queue is closed.
        """
        if self._closed:
            raise ShuttingDown()
        name = CURRENT_RUN.get() if run is None else run
        waiter: _Waiter[T] = _Waiter(asyncio.get_running_loop().create_future(), count, self._clock())
        self._run(name).waiting.append(waiter)
        self._count(waiting=1)
        self._serve()
        try:
            async with asyncio.timeout(timeout):
                grant = await waiter.granted
        except BaseException:
            self._forget(name, waiter)
            raise
        count_wait(grant.began - waiter.arrived)
        return grant

    def settle(self, grant: Grant[T], reusable: bool = True) -> None:
        """Hand back what was granted: its seconds, for each thing, count for its run.

        `reusable`: others may have it now.
        """
        run, count = self._runs[grant.run], len(grant.things)
        run.ended += (self._clock() - grant.began) * count
        run.held -= count
        run.began -= grant.began * count
        self._count(running=-1)
        self._tidy(grant.run)
        if reusable:
            self.offer(*grant.things)

    def close(self) -> None:
        self._closed = True
        for run in self._runs.values():
            for waiter in run.waiting:
                if not waiter.granted.done():
                    waiter.granted.set_exception(ShuttingDown())

    def _run(self, name: str) -> _Run[T]:
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = _Run(self._floor)
            if len(self._runs) > _MOST_RUNS:
                self._drop_idle()
        elif run.idle:
            run.ended = max(run.ended, self._floor)
        return run

    def _serve(self) -> None:
        now = self._clock()
        while self._things and self.waiting and not self._closed:
            waiting = ((name, run) for name, run in self._runs.items() if run.waiting)
            name, run = min(waiting, key=lambda entry: entry[1].used(now))
            waiter = run.waiting[0]
            if not waiter.granted.done() and waiter.count > len(self._things):
                return
            run.waiting.popleft()
            if waiter.granted.done():  # given up; its task has not yet had the time to say so
                self._count(waiting=-1)
                continue
            self._floor = max(self._floor, run.used(now))
            run.held += waiter.count
            run.began += now * waiter.count
            # Behind its equals, so that runs that have used as much take turns.
            self._runs[name] = self._runs.pop(name)
            self._count(waiting=-1, running=1)
            things = [self._things.popleft() for _ in range(waiter.count)]
            waiter.granted.set_result(Grant(things, name, now))

    def _forget(self, name: str, waiter: _Waiter[T]) -> None:
        """Undo a wait that was given up, even if its grant has just come."""
        granted = waiter.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self.settle(granted.result())
            return
        run = self._runs.get(name)
        if run is not None and waiter in run.waiting:
            run.waiting.remove(waiter)
            self._count(waiting=-1)
        self._tidy(name)
        self._serve()  # who wanted more than was there may have stood before others

    def _tidy(self, name: str) -> None:
        """Forget what nobody needs: all use when all is quiet, a run's when it has used no more than the others."""
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
    """`size` places. A batch takes all it needs or none; a stream waits for those of one item."""

    def __init__(self, size: int):
        self._size = size
        self._taken = 0
        self._held: Counter[str] = Counter()
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
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
        """How long, since the service began, any place was taken."""
        return self._busy_before + (time.monotonic() - self._busy_since if self._taken else 0.0)

    def free_for(self, run: str) -> int:
        return max(self.free - self._held[run], 0)

    def try_take(self, run: str, count: int) -> bool:
        """Take `count` places for `run` if it may have so many."""
        if count > self.free_for(run):
            return False
        if not count:
            return True
        if self._taken == 0:
            self._busy_since = time.monotonic()
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
        line = self._lines.setdefault(run, asyncio.Lock())
        async with line:
            while not self.try_take(run, count):
                await self._freed.wait()

    def give(self, run: str, count: int = 1) -> None:
        if not count:
            return
        self._taken -= count
        self._held[run] -= count
        if not self._held[run]:
            del self._held[run]
        if not self._taken:
            self._busy_before += time.monotonic() - self._busy_since
            self._empty.set()
        self._freed.set()  # wakes those that wait now, and no others
        self._freed.clear()

    async def wait_empty(self) -> None:
        await self._empty.wait()
