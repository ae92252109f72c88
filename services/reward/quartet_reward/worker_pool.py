"""A pool of worker processes that can be killed: at a deadline, on cancellation, after a number of tasks.

Each worker serves one task at a time. A caller holds a worker while it waits for it, so a cancelled caller kills the
work it asked for; a fresh process takes the place of every one that is killed, dies or is retired.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from quartet_common.log import get_logger
from quartet_reward import telemetry
from quartet_reward.worker_process import TaskTimedOut, WorkerDied, WorkerProcess

log = get_logger(__name__)

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 15.0


class PoolClosed(Exception):
    """The service is shutting down."""


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
    """`workers` processes and the queue before them, first come, first served."""

    def __init__(self, workers: int, limits: Limits):
        self._workers = workers
        self._limits = limits
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._all: set[WorkerProcess] = set()
        self._tasks: set[asyncio.Task] = set()
        self._closed = asyncio.Event()
        self.waiting = 0
        self.busy = 0

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
        arrived = time.perf_counter()
        worker = await self._take()
        began = time.perf_counter()
        self.busy += 1
        fate = "died"
        try:
            message = await worker.ask(request, self._limits.deadline_seconds)
            fate = "recycled" if worker.tasks_done >= self._limits.recycle_after else ""
        except TaskTimedOut:
            fate = "deadline"
            raise
        except asyncio.CancelledError:
            fate = "cancelled"
            raise
        except WorkerDied:
            if self._closed.is_set():
                raise PoolClosed("the reward service is shutting down") from None
            raise
        finally:
            self.busy -= 1
            if fate:
                self._replace(worker, fate)
            else:
                self._idle.put_nowait(worker)
        return Reply(message, began - arrived)

    async def _take(self) -> WorkerProcess:
        self.waiting += 1
        telemetry.QUEUE_DEPTH.set(self.waiting)
        taking = asyncio.create_task(self._idle.get())
        closing = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait(
                (taking, closing), timeout=self._limits.queue_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if self._closed.is_set():
                raise PoolClosed("the reward service is shutting down")
            if not taking.done():
                raise WorkerDied(f"no worker became free within {self._limits.queue_seconds:g} s")
            return taking.result()
        except BaseException:
            if taking.done() and not taking.cancelled():
                self._idle.put_nowait(taking.result())
            raise
        finally:
            taking.cancel()
            closing.cancel()
            self.waiting -= 1
            telemetry.QUEUE_DEPTH.set(self.waiting)

    def _replace(self, worker: WorkerProcess, reason: str) -> None:
        telemetry.WORKERS_ENDED.labels(reason).inc()
        worker.kill()
        self._spawn(self._bury(worker))
        if not self._closed.is_set():
            self._spawn(self._add_worker())

    async def _bury(self, worker: WorkerProcess) -> None:
        await worker.reap()
        self._all.discard(worker)

    async def _add_worker(self) -> None:
        """Add a worker; a start that fails is said and tried again, for ever but ever more slowly."""
        pause = _FIRST_RETRY_SECONDS
        while not self._closed.is_set():
            try:
                self._idle.put_nowait(await self._started())
                return
            except (OSError, WorkerDied) as error:
                log.error("a worker process does not start: %s; next try in %.1f s", error, pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), timeout=pause)
            pause = min(2 * pause, _LAST_RETRY_SECONDS)

    async def _started(self) -> WorkerProcess:
        worker = WorkerProcess(self._limits.memory_bytes)
        self._all.add(worker)
        try:
            await worker.await_ready()
        except WorkerDied:
            worker.kill()
            await self._bury(worker)
            raise
        return worker

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
