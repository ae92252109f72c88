"""A pool of worker processes that can be killed: at a deadline, on cancellation, after a number of tasks.

Each worker serves one task at a time. A caller holds a worker while it waits for it, so a cancelled caller kills the
work it asked for; a fresh process takes the place of every one that is killed, dies or is retired.
"""

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from quartet_common.log import get_logger
from quartet_reward import frames, telemetry

log = get_logger(__name__)

# Importing math-verify takes a second of CPU; on a busy machine, many seconds.
_START_SECONDS = 60.0
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 15.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class TaskTimedOut(Exception):
    """The worker was killed at the deadline. `reference_read` tells which side of the comparison took so long."""

    def __init__(self, seconds: float, reference_read: bool):
        super().__init__(f"killed after {seconds:.1f} s")
        self.reference_read = reference_read


class WorkerDied(Exception):
    """The worker ended on its own, or was starved: the task says nothing about its input."""


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
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._all: set[_Worker] = set()
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
            self._start_worker()

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

    async def _take(self) -> "_Worker":
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

    def _replace(self, worker: "_Worker", reason: str) -> None:
        telemetry.WORKERS_ENDED.labels(reason).inc()
        worker.kill()
        self._spawn(self._bury(worker))
        if not self._closed.is_set():
            self._start_worker()

    async def _bury(self, worker: "_Worker") -> None:
        await worker.reap()
        self._all.discard(worker)

    def _start_worker(self) -> None:
        self._spawn(self._add_worker())

    async def _add_worker(self) -> None:
        """Add a worker; a start that fails is said and tried again, for ever but ever more slowly."""
        pause = _FIRST_RETRY_SECONDS
        while not self._closed.is_set():
            worker = await _Worker.spawn(self._limits.memory_bytes)
            self._all.add(worker)
            try:
                await worker.await_ready()
            except WorkerDied as error:
                log.error("a worker process does not start: %s; next try in %.1f s", error, pause)
                worker.kill()
                await self._bury(worker)
                try:
                    await asyncio.wait_for(self._closed.wait(), timeout=pause)
                except TimeoutError:
                    pause = min(2 * pause, _LAST_RETRY_SECONDS)
                continue
            self._idle.put_nowait(worker)
            return

    def _spawn(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Worker:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self.pid = process.pid
        self.tasks_done = 0

    @classmethod
    async def spawn(cls, memory_bytes: int) -> "_Worker":
        """Start a process that knows nothing of this one's environment but where Python's modules are."""
        environment = {
            name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG", "VIRTUAL_ENV") if name in os.environ
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quartet_reward.worker",
            "--memory-bytes", str(memory_bytes), "--parent", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment,
        )  # fmt: skip
        return cls(process)

    async def await_ready(self) -> None:
        """Wait until the process serves. Raises WorkerDied."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._receive()
        except TimeoutError:
            raise WorkerDied(f"it was not ready within {_START_SECONDS:g} s") from None

    async def ask(self, request: dict[str, Any], deadline_seconds: float) -> dict[str, Any]:
        """Have a task done. Raises TaskTimedOut or WorkerDied; the process is then of no more use."""
        cpu_before, reference_read = self._cpu_seconds(), False
        try:
            async with asyncio.timeout(deadline_seconds):
                # CPU time is the kernel's guard behind our own clock: twice as long, should this process be stuck.
                await self._send({**request, "cpu_seconds": 2 * deadline_seconds + 1})
                while (message := await self._receive())["event"] == "reference_read":
                    reference_read = True
        except TimeoutError:
            used = self._cpu_seconds() - cpu_before
            self.kill()
            if used < deadline_seconds / 4:
                raise WorkerDied(f"it got only {used:.1f} s of CPU in {deadline_seconds:g} s") from None
            raise TaskTimedOut(deadline_seconds, reference_read) from None
        self.tasks_done += 1
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(frames.pack(message))
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise WorkerDied(await self._cause()) from error

    async def _receive(self) -> dict[str, Any]:
        try:
            header = await self._process.stdout.readexactly(frames.HEADER.size)
            return frames.unpack(await self._process.stdout.readexactly(frames.body_length(header)))
        except asyncio.IncompleteReadError as error:
            raise WorkerDied(await self._cause()) from error
        except ValueError as error:
            raise WorkerDied(f"it sent no frame: {error}") from error

    async def _cause(self) -> str:
        self.kill()  # its pipes are closed, so it is of no use whether it lives or not
        status = await self._process.wait()
        return f"signal {-status} ended it" if status < 0 else f"it exited with status {status}"

    def _cpu_seconds(self) -> float:
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

    def kill(self) -> None:
        """End the process at once; harmless if it has ended."""
        if self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                return

    async def reap(self) -> None:
        """Wait until the process is gone and close its pipes."""
        await self._process.wait()
        self._process.stdin.close()
