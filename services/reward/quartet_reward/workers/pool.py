"""A pool of worker processes that can be killed: at a deadline, on cancellation, after a number of tasks.

Each worker serves one task at a time, and runs have it in turns (`queue`). A caller holds a worker while it waits
for it, so a cancelled caller kills the work it asked for; a fresh process takes the place of every one that is killed,
dies or is retired.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from quartet_common.log import get_logger
from quartet_reward import metrics
from quartet_reward.queue import FairQueue, Grant, QueueClosed
from quartet_reward.workers.process import TaskTimedOut, WorkerDied, WorkerProcess

log = get_logger(__name__)

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 15.0

PoolClosed = QueueClosed


@dataclass(frozen=True)
class Limits:
    """What a worker may use, and how long it lives."""

    deadline_seconds: float
    memory_bytes: int
    recycle_after: int
    queue_seconds: float


@dataclass(frozen=True)
class Reply:
    """A worker's answer and the seconds the task had waited for a worker."""

    message: dict[str, Any]
    queued_seconds: float


class WorkerPool:
    """`workers` processes and the fair queue before them."""

    def __init__(
        self,
        workers: int,
        limits: Limits,
        start: Callable[[int], WorkerProcess] = WorkerProcess.for_mathematics,
        name: str = "math",
    ):
        """`start` starts a process that may use so many bytes of memory; `name` is the pool's in the metrics."""
        self._workers = workers
        self._limits = limits
        self._start_process = start
        self._name = name
        self._idle: FairQueue[WorkerProcess] = FairQueue(name)
        self._all: set[WorkerProcess] = set()
        self._tasks: set[asyncio.Task] = set()
        self._closed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Tasks that wait for a worker."""
        return self._idle.waiting

    @property
    def busy(self) -> int:
        """Workers that have a task."""
        return self._idle.running

    @property
    def pids(self) -> frozenset[int]:
        """The processes there are, those that start and those that end included."""
        return frozenset(worker.pid for worker in self._all)

    def start(self) -> None:
        """Begin to start the workers; tasks may be run at once and wait for them."""
        for _ in range(self._workers):
            self._spawn(self._add_worker())

    async def close(self) -> None:
        """Kill all workers; tasks that wait or run raise PoolClosed."""
        self._closed.set()
        self._idle.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for worker in tuple(self._all):
            worker.kill()
        await asyncio.gather(*(worker.reap() for worker in tuple(self._all)))

    async def run(self, request: dict[str, Any]) -> Reply:
        """Run a task in a worker.

        Raises:
            TaskTimedOut: it was killed at its deadline.
            WorkerDied: the worker ended by itself, was starved of CPU, or none could be had within `queue_seconds`.
            PoolClosed: the service is shutting down.
        """
        grant = await self._take()
        worker = grant.thing
        fate = "died"
        try:
            message = await worker.ask(request, self._limits.deadline_seconds)
            fate = "recycled" if worker.tasks_done >= self._limits.recycle_after else ""
        except TaskTimedOut as error:
            fate, error.queued_seconds = "deadline", grant.queued_seconds
            raise
        except asyncio.CancelledError:
            fate = "cancelled"
            raise
        except WorkerDied:
            if self._closed.is_set():
                raise PoolClosed("the reward service is shutting down") from None
            raise
        finally:
            self._idle.settle(grant)
            if fate:
                self._replace(worker, fate)
            else:
                self._idle.offer(worker)
        return Reply(message, grant.queued_seconds)

    async def _take(self) -> Grant[WorkerProcess]:
        try:
            return await self._idle.take(timeout=self._limits.queue_seconds)
        except TimeoutError:
            raise WorkerDied(f"no worker became free within {self._limits.queue_seconds:g} s") from None

    def _replace(self, worker: WorkerProcess, reason: str) -> None:
        metrics.WORKERS_ENDED.labels(self._name, reason).inc()
        worker.kill()
        self._spawn(self._bury(worker))
        if not self._closed.is_set():
            self._spawn(self._add_worker())

    async def _bury(self, worker: WorkerProcess) -> None:
        await worker.reap()
        self._all.discard(worker)
        self._count_alive()

    async def _add_worker(self) -> None:
        """Add a worker; a start that fails is said and tried again, for ever but ever more slowly."""
        pause = _FIRST_RETRY_SECONDS
        while not self._closed.is_set():
            try:
                self._idle.offer(await self._started())
                return
            except (OSError, WorkerDied) as error:
                log.error("a worker process does not start: %s; next try in %.1f s", error, pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), timeout=pause)
            pause = min(2 * pause, _LAST_RETRY_SECONDS)

    async def _started(self) -> WorkerProcess:
        worker = self._start_process(self._limits.memory_bytes)
        self._all.add(worker)
        self._count_alive()
        try:
            await worker.await_ready()
        except WorkerDied:
            worker.kill()
            await self._bury(worker)
            raise
        return worker

    def _count_alive(self) -> None:
        metrics.WORKERS_ALIVE.labels(self._name).set(len(self._all))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
