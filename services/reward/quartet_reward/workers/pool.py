"""A pool of worker processes that are killed at a deadline or on cancellation, and replaced after a number of tasks.

A worker serves one task at a time; runs take turns (`queue`). Cancelling a caller kills the worker that serves it.
Every worker that ends is replaced by a new process.
"""

import asyncio
import os
from contextlib import suppress
from typing import Any

from quartet_common.log import get_logger
from quartet_reward import metrics
from quartet_reward.begun import admitted
from quartet_reward.errors import ShuttingDown
from quartet_reward.queue import FairQueue
from quartet_server.fair_queue import Grant
from quartet_server.worker_process import WorkerCommand, WorkerDied, WorkerProcess

# A worker that got less than this share of a processor until its deadline was starved: its task is not to blame.
_STARVED = 0.05
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

log = get_logger(__name__)
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 15.0


class TaskTimedOut(Exception):
    """The worker was killed at the deadline."""

    def __init__(self, seconds: float):
        super().__init__(f"killed after {seconds:.1f} s")


class NoFreeWorker(WorkerDied):
    """No worker became free in time: all are busy or fail to start."""


class OneTaskWorker(WorkerProcess):
    """A worker process that serves one task at a time."""

    def __init__(self, command: WorkerCommand):
        super().__init__(command)
        self.tasks_done = 0
        self.retired: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set when the pool must replace it: the label `reason` of the metrics."""

    async def ask(self, request: dict[str, Any], deadline_seconds: float) -> dict[str, Any]:
        """Send a task and return its answer. Raises TaskTimedOut, WorkerDied; the process must then be replaced."""
        cpu_before = self._cpu_seconds()
        try:
            async with asyncio.timeout(deadline_seconds):
                # In case the service itself hangs, the kernel ends the worker after twice the deadline in CPU time.
                await self.send({**request, "cpu_seconds": 2 * deadline_seconds + 1})
                message = await self.receive()
        except TimeoutError:
            used, is_stopped = self._cpu_seconds() - cpu_before, self._stat()[:1] in (["T"], ["t"])
            self.kill()
            if is_stopped:
                raise WorkerDied(f"a signal had stopped it, and it was killed after {deadline_seconds:g} s") from None
            if used < _STARVED * deadline_seconds and not self.command.may_wait:
                raise WorkerDied(f"it got only {used:.1f} s of CPU in {deadline_seconds:g} s") from None
            raise TaskTimedOut(deadline_seconds) from None
        self.tasks_done += 1
        return message

    def _cpu_seconds(self) -> float:
        return sum(map(int, self._stat()[11:13])) / _CLOCK_TICKS

    def _stat(self) -> list[str]:
        """Return the fields of its /proc/PID/stat from the state on; none if it has ended or no file can be opened."""
        with suppress(OSError), open(f"/proc/{self.pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()
        return []


class WorkerPool:
    """Worker processes and their fair queue."""

    def __init__(
        self,
        name: str,
        command: WorkerCommand,
        deadline_seconds: float,
        queue_seconds: float,
        workers: int = 1,
        recycle_after: int | None = None,
    ):
        """Configure the pool; `start` starts it.

        Args:
            name: label `pool` of the metrics.
            command: what the processes run.
            deadline_seconds: longest time of a task.
            queue_seconds: longest wait for a worker.
            workers: number of processes.
            recycle_after: tasks after which a process is replaced; None: never.
        """
        self._name = name
        self._command = command
        self._deadline_seconds = deadline_seconds
        self._queue_seconds = queue_seconds
        self._workers = workers
        self._recycle_after = recycle_after
        self._idle: FairQueue[OneTaskWorker] = FairQueue(name)
        self._all: set[OneTaskWorker] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._closed = False
        self.ready = asyncio.Event()
        """Set when the first worker serves."""

    @property
    def waiting(self) -> int:
        return self._idle.waiting

    @property
    def busy(self) -> int:
        return self._idle.running

    @property
    def pids(self) -> frozenset[int]:
        """Process ids, including workers that are starting or ending."""
        return frozenset(worker.pid for worker in self._all)

    def start(self) -> None:
        """Start the workers in the background; `run` may be called at once."""
        self._keepers = [asyncio.create_task(self._keep_one()) for _ in range(self._workers)]

    async def close(self) -> None:
        """Kill all workers; waiting and running tasks raise ShuttingDown."""
        if not self._closed:
            self._closed = True
            self._idle.close()
            for keeper in self._keepers:
                keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a task in a worker and return its answer; retry once if the worker dies.

        Raises:
            TaskTimedOut: the worker was killed at the deadline.
            WorkerDied: two workers died or were starved of CPU; NoFreeWorker: none was free within `queue_seconds`.
            ShuttingDown: the pool is closed.
        """
        await admitted()
        grant = await self._acquire()
        try:
            return await self._ask(grant, request)
        except WorkerDied as error:
            log.warning("a worker died (%s); the task is tried once more", error, extra={"pool": self._name})
        return await self._ask(await self._acquire(), request)

    async def _acquire(self) -> Grant[OneTaskWorker]:
        try:
            return await self._idle.acquire(timeout=self._queue_seconds)
        except TimeoutError:
            raise NoFreeWorker(f"no worker became free within {self._queue_seconds:g} s") from None

    async def _ask(self, grant: Grant[OneTaskWorker], request: dict[str, Any]) -> dict[str, Any]:
        """Run a task in the granted worker and release it; replace the worker if it cannot serve again."""
        worker = grant.resource
        reason = "died"
        try:
            answer = await worker.ask(request, self._deadline_seconds)
            reason = "recycled" if worker.tasks_done == self._recycle_after or answer.get("last") else ""
            return answer
        except TaskTimedOut:
            reason = "deadline"
            raise
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        except WorkerDied:
            if self._closed:
                raise ShuttingDown from None
            raise
        finally:
            self._idle.release(grant, reusable=not reason)
            if reason:
                worker.kill()
                if not worker.retired.done():  # the pool is closed
                    worker.retired.set_result(reason)

    async def _keep_one(self) -> None:
        """Keep one worker alive for ever; a failed start is logged and retried with backoff."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                await self._live()
                pause = _FIRST_RETRY_SECONDS
            except (OSError, WorkerDied) as error:
                log.error("a worker process does not start: %s; next try in %.1f s", error, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_RETRY_SECONDS)

    async def _live(self) -> None:
        """Start a worker, add it to the queue and wait until it must be replaced. Raises OSError, WorkerDied."""
        worker = OneTaskWorker(self._command)
        self._all.add(worker)
        self._count_alive()
        try:
            await worker.await_ready()
            self._idle.add(worker)
            self.ready.set()
            metrics.WORKERS_ENDED.labels(self._name, await worker.retired).inc()
        finally:
            await worker.end()
            self._all.discard(worker)
            self._count_alive()

    def _count_alive(self) -> None:
        metrics.WORKERS_ALIVE.labels(self._name).set(len(self._all))
