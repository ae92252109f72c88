"""A pool of worker processes that can be killed: at a deadline, on cancellation, after a number of tasks.

Each worker serves one task at a time, and runs have it in turns (`queue`). A caller holds a worker while it waits
for it, so a cancelled caller kills the work it asked for; a fresh process takes the place of every one that is killed,
dies or is retired.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quartet_common.log import get_logger
from quartet_reward import metrics
from quartet_reward.errors import ShuttingDown
from quartet_reward.queue import FairQueue
from quartet_reward.workers import protocol

# A worker that got less than this share of a processor until its deadline was starved: that says nothing of its task.
_STARVED = 0.05
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# What a worker sees of this process's environment: where Python's modules are, and nothing secret.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "VIRTUAL_ENV")

log = get_logger(__name__)
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 15.0


class TaskTimedOut(Exception):
    """The worker was killed at the deadline."""

    def __init__(self, seconds: float):
        super().__init__(f"killed after {seconds:.1f} s")


class WorkerDied(Exception):
    """The worker ended on its own, or was starved.

    `crashed`: by a signal that only it sends itself, or by an exit; else the end says nothing about its input.
    """

    def __init__(self, reason: str, crashed: bool = False):
        super().__init__(reason)
        self.crashed = crashed


@dataclass(frozen=True)
class WorkerCommand:
    """What the processes of a pool run."""

    module: str
    """Run by `python -m`, with `arguments` and `--parent`, the service's process id."""
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beyond the few that every worker has."""
    start_seconds: float = 60.0
    """Longest time until it says that it is ready."""
    may_wait: bool = False
    """A task may use little CPU, as one that calls a server; else it counts as starved at the deadline."""


class WorkerProcess:
    """A process that answers messages, and the socket to it. Serves one task at a time."""

    def __init__(self, command: WorkerCommand):
        """Start the process; `await_ready` returns when it serves. Raises OSError: there can be no process."""
        self._socket, theirs = socket.socketpair()
        self._command = command
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            # Not asyncio's own subprocesses: in Python 3.11 a cancelled start of one waits for ever.
            self._process = subprocess.Popen(
                [sys.executable, "-m", command.module, *command.arguments, f"--parent={os.getpid()}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env={**environment, **command.variables},
                # Kernels share processors among sessions first (man 7 sched, autogroup): in the service's own, an
                # answer that keeps its worker computing kept the service from answering others.
                start_new_session=True,
            )
        self._writer: asyncio.StreamWriter | None = None
        self.pid = self._process.pid
        self.tasks_done = 0
        self.fate: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it is of no more use, as the metrics name it."""

    async def await_ready(self) -> None:
        """Wait until the process serves. Raises WorkerDied."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=protocol.LONGEST_LINE)
        try:
            async with asyncio.timeout(self._command.start_seconds):
                await self._receive()
        except TimeoutError:
            raise WorkerDied(f"it was not ready within {self._command.start_seconds:g} s") from None

    async def ask(self, request: dict[str, Any], deadline_seconds: float) -> dict[str, Any]:
        """Have a task done. Raises TaskTimedOut or WorkerDied; the process is then of no more use."""
        cpu_before = self._cpu_seconds()
        try:
            async with asyncio.timeout(deadline_seconds):
                # CPU time is the kernel's guard behind our own clock: twice as long, should this process be stuck.
                await self._send({**request, "cpu_seconds": 2 * deadline_seconds + 1})
                message = await self._receive()
        except TimeoutError:
            used = self._cpu_seconds() - cpu_before
            self.kill()
            if used < _STARVED * deadline_seconds and not self._command.may_wait:
                raise WorkerDied(f"it got only {used:.1f} s of CPU in {deadline_seconds:g} s") from None
            raise TaskTimedOut(deadline_seconds) from None
        self.tasks_done += 1
        return message

    def kill(self) -> None:
        """End the process at once; harmless if it has ended."""
        self._process.kill()

    async def end(self) -> None:
        """Kill the process, wait until it is gone and close the socket to it."""
        self.kill()
        await asyncio.to_thread(self._process.wait)
        (self._writer or self._socket).close()

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None, "start() comes first"
        try:
            self._writer.write(protocol.pack(message))
            await self._writer.drain()
        except ConnectionError as error:
            raise await self._death() from error

    async def _receive(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
            if line.endswith(b"\n"):
                return protocol.unpack(line)
        except ConnectionError as error:
            raise await self._death() from error
        except ValueError as error:
            raise WorkerDied(f"what it sent is no message: {error}") from error
        raise await self._death()

    async def _death(self) -> WorkerDied:
        self.kill()  # its socket is closed, so it is of no use whether it lives or not
        status = await asyncio.to_thread(self._process.wait)
        from_outside = status in (-signal.SIGKILL, -signal.SIGTERM)
        reason = f"signal {-status} ended it" if status < 0 else f"it exited with status {status}"
        return WorkerDied(reason, crashed=not from_outside)

    def _cpu_seconds(self) -> float:
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except OSError:  # it has ended, or this process has no descriptor left
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


class WorkerPool:
    """Processes and the fair queue before them."""

    def __init__(
        self,
        name: str,
        command: WorkerCommand,
        deadline_seconds: float,
        queue_seconds: float,
        workers: int = 1,
        recycle_after: int | None = None,
    ):
        """Prepare; `start` starts.

        Args:
            name: the pool's in the metrics.
            command: what its processes run.
            deadline_seconds: longest time of a task.
            queue_seconds: longest wait for a process.
            workers: how many there are.
            recycle_after: tasks after which a process is replaced; None: never.
        """
        self._name = name
        self._command = command
        self._deadline_seconds = deadline_seconds
        self._queue_seconds = queue_seconds
        self._workers = workers
        self._recycle_after = recycle_after
        self._idle: FairQueue[WorkerProcess] = FairQueue(name)
        self._all: set[WorkerProcess] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def waiting(self) -> int:
        return self._idle.waiting

    @property
    def busy(self) -> int:
        return self._idle.running

    @property
    def pids(self) -> frozenset[int]:
        """The processes there are, those that start and those that end included."""
        return frozenset(worker.pid for worker in self._all)

    def start(self) -> None:
        """Begin to start the workers; tasks may be run at once and wait for them."""
        self._keepers = [asyncio.create_task(self._keep_one()) for _ in range(self._workers)]

    async def close(self) -> None:
        """Kill all workers; tasks that wait or run raise ShuttingDown."""
        if not self._closed:
            self._closed = True
            self._idle.close()
            for keeper in self._keepers:
                keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a task in a worker and return its answer. Where the worker dies, another one tries once more.

        Raises:
            TaskTimedOut: it was killed at its deadline.
            WorkerDied: the worker ended by itself, was starved of CPU, or none could be had within `queue_seconds`.
            ShuttingDown: the pool is closed.
        """
        try:
            return await self._run(request)
        except WorkerDied as error:
            log.warning("a worker died (%s); the task is tried once more", error, extra={"pool": self._name})
            return await self._run(request)

    async def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            grant = await self._idle.take(timeout=self._queue_seconds)
        except TimeoutError:
            raise WorkerDied(f"no worker became free within {self._queue_seconds:g} s") from None
        worker = grant.thing
        fate = "died"
        try:
            answer = await worker.ask(request, self._deadline_seconds)
            fate = "recycled" if worker.tasks_done == self._recycle_after or answer.get("last") else ""
            return answer
        except TaskTimedOut:
            fate = "deadline"
            raise
        except asyncio.CancelledError:
            fate = "cancelled"
            raise
        except WorkerDied:
            if self._closed:
                raise ShuttingDown from None
            raise
        finally:
            self._idle.settle(grant, reusable=not fate)
            if fate:
                worker.kill()
                if not worker.fate.done():  # the pool is closed
                    worker.fate.set_result(fate)

    async def _keep_one(self) -> None:
        """Keep a worker, one after the other; a start that fails is said and tried again, ever more slowly."""
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
        """Start a worker and lend it out until it is of no more use. Raises OSError, WorkerDied: it does not start."""
        worker = WorkerProcess(self._command)
        self._all.add(worker)
        self._count_alive()
        try:
            await worker.await_ready()
            self._idle.offer(worker)
            metrics.WORKERS_ENDED.labels(self._name, await worker.fate).inc()
        finally:
            await worker.end()
            self._all.discard(worker)
            self._count_alive()

    def _count_alive(self) -> None:
        metrics.WORKERS_ALIVE.labels(self._name).set(len(self._all))
