"""The sandbox: chooses its mode, keeps a fork server running, and gives slots to jobs."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence

from quartet_common.log import get_logger
from quartet_reward import metrics
from quartet_reward.begun import admitted
from quartet_reward.config import Mode, SandboxSection
from quartet_reward.errors import ShuttingDown
from quartet_reward.queue import FairQueue
from quartet_reward.sandbox import probe
from quartet_reward.sandbox.api import Execution, Job, KilledFromOutside, SandboxUnavailable
from quartet_reward.sandbox.run import JobRun, seal_inputs
from quartet_reward.sandbox.server_handle import ServerHandle
from quartet_server.fair_queue import Grant

log = get_logger(__name__)

# After a failed start, further jobs fail at once with the same reason for this long.
_RETRY_SECONDS = 10.0


def modes_to_try() -> list[Mode]:
    """Return the modes that this user can use, the strongest first."""
    return list(Mode) if os.geteuid() == 0 else [Mode.NAMESPACES]


class Sandbox:
    """Runs programs in the strongest mode that works on this host. For one event loop.

    The fork server is started with the first program, and restarted when it has died. Runs take turns at the slots. As
    root, each slot has a user of its own.
    """

    def __init__(self, settings: SandboxSection, queue_seconds: float = 300.0, only: Mode | None = None):
        """`queue_seconds`: longest wait for a slot. `only`: no other mode is tried."""
        self._settings = settings
        self._queue_seconds = queue_seconds
        strong_enough = list(Mode)[: list(Mode).index(settings.minimum) + 1]
        self._modes = [mode for mode in modes_to_try() if mode in strong_enough and only in (None, mode)]
        self.mode: Mode | None = None
        """The mode in use; None before the first start."""
        self._server: ServerHandle | None = None
        self._starting = asyncio.Lock()
        self._refusal = (0.0, "")
        self._slots: FairQueue[int] = FairQueue("code")
        self._slots.add(*range(settings.slots))
        self._endings: set[asyncio.Task] = set()
        self._starts: set[asyncio.Task] = set()
        """Referenced here because the event loop holds tasks weakly."""
        self._closed = False
        self.survivors = 0
        """Executions whose pipes were still held by a process after their end."""

    @property
    def fork_server(self) -> int | None:
        """Its process id, None while none runs."""
        return self._server.pid if self._server and not self._server.gone.is_set() else None

    @property
    def waiting(self) -> int:
        return self._slots.waiting

    @property
    def running(self) -> int:
        return self._slots.running

    async def start(self) -> None:
        """Start the fork server if none runs.

        Raises:
            SandboxUnavailable: no mode as strong as `settings.minimum` works; the text says why, and what would help.
            ShuttingDown: the sandbox is closed.
        """
        await self._running_server()

    async def run(self, job: Job) -> Execution:
        """Run a job; retry it once if something outside killed it. Cancelling the task kills the job's process tree.

        Raises:
            SandboxUnavailable: the job could not be run.
            ShuttingDown: the sandbox is closed.
        """
        (execution,) = await self._twice_if_killed(job)
        return execution

    async def run_judged(self, judge: Job, candidate: Job) -> tuple[Execution, Execution]:
        """Run two jobs in two sandboxes that share nothing but a socket pair (descriptor 3 in each).

        When the judge ends, the candidate is killed. When the candidate ends first, the judge reads end-of-file from
        the socket and runs on. Raises as `run` does.
        """
        answered, judged = await self._twice_if_killed(candidate, judge)
        return judged, answered

    async def close(self) -> None:
        """Kill all jobs and the fork server. May be called again."""
        self._closed = True
        self._slots.close()
        async with self._starting:
            if self._server:
                await self._server.close()
        await asyncio.gather(*self._endings)

    async def _twice_if_killed(self, *jobs: Job) -> list[Execution]:
        await admitted()
        try:
            executions = await self._run(jobs)
        except KilledFromOutside as error:
            log.warning("a program is run again", extra={"reason": str(error)})
            metrics.EXECUTIONS.labels("repeated").inc()
            executions = await self._run(jobs)
        for execution in executions:
            metrics.EXECUTIONS.labels(execution.ending.value).inc()
        return executions

    async def _run(self, jobs: Sequence[Job]) -> list[Execution]:
        """Run one job, or two joined by a socket pair, until the last one ends; then kill the other."""
        grant = await self._take(len(jobs))
        runs: list[JobRun] = []
        try:
            server = await self._running_server()
            with contextlib.ExitStack() as open_here:
                ends: list[int | None] = [None]
                if len(jobs) > 1:
                    ends = [open_here.enter_context(end).fileno() for end in socket.socketpair()]
                for slot, job, end in zip(grant.resources, jobs, ends, strict=True):
                    runs.append(JobRun(server, slot, job, await seal_inputs(job), end))
            if len(runs) > 1:
                runs[0].beside, runs[-1].beside = runs[-1], runs[0]
            await runs[-1].ended.wait()
            for run in runs:
                run.kill(None)
                await run.ended.wait()
        finally:
            for run in runs:
                run.kill(None)
            self._give_back(grant, *runs)
        return [run.execution() for run in runs]

    async def _take(self, count: int) -> Grant[int]:
        """Wait for slots, all at once. Raises SandboxUnavailable, ShuttingDown."""
        try:
            return await self._slots.acquire(timeout=self._queue_seconds, count=count)
        except TimeoutError:
            raise SandboxUnavailable(f"no slot became free within {self._queue_seconds:g} s") from None

    def _give_back(self, grant: Grant[int], *runs: JobRun) -> None:
        """Release the slots, in the background, when the runs' process trees are gone."""

        async def release_when_ended() -> None:
            for run in runs:
                await run.ended.wait()
                self.survivors += run.survived
            self._slots.release(grant)

        task = asyncio.create_task(release_when_ended())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _running_server(self) -> ServerHandle:
        """Return the fork server; start one if none runs. Raises as `start` does."""
        if self._server is not None and not self._server.gone.is_set() and not self._closed:
            return self._server
        # Shielded: if the caller is cancelled, the next one needs the server too.
        start = asyncio.create_task(self._start_server())
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)
        start.add_done_callback(lambda start: start.cancelled() or start.exception())  # retrieved by a cancelled caller
        return await asyncio.shield(start)

    async def _start_server(self) -> ServerHandle:
        async with self._starting:
            if self._closed:
                raise ShuttingDown
            if self._server is not None and self._server.gone.is_set():
                log.error("a fork server died and is started again", extra={"reason": self._server.last_words})
                await self._server.close()
                self._server = None
            if self._server is None:
                until, reason = self._refusal
                if time.monotonic() < until:
                    raise SandboxUnavailable(reason)
                try:
                    self._server = await (self._start_in(self.mode) if self.mode else self._start_in_strongest_mode())
                except SandboxUnavailable as error:
                    self._refusal = time.monotonic() + _RETRY_SECONDS, str(error)
                    raise
            return self._server

    async def _start_in_strongest_mode(self) -> ServerHandle:
        """Start a fork server in the strongest mode that withstands the probe."""
        reasons = []
        for mode in self._modes:
            try:
                server = await self._start_in(mode, attack=True)
            except SandboxUnavailable as error:
                reasons.append(f"{mode}: {error}")
                log.warning("a mode of the sandbox does not work here", extra={"mode": mode, "reason": str(error)})
            else:
                self.mode = mode
                return server
        raise SandboxUnavailable(
            "no mode of the sandbox at least as strong as reward.sandbox.minimum = "
            f"{self._settings.minimum.value!r} works here ({'; '.join(reasons) or 'this user can try none of them'}). "
            "Allow user namespaces to this user (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns=0), or run the service as root on a kernel with Landlock."
        )

    async def _start_in(self, mode: Mode, attack: bool = False) -> ServerHandle:
        server = ServerHandle(mode, self._settings)
        try:
            await server.await_ready()
            if attack:
                # No program runs before the server has started, so slot 0 is free even if it has been granted.
                run = JobRun(server, 0, probe.job(), await seal_inputs(probe.job()))
                await run.ended.wait()
                probe.require_no_leak(run.execution(), run.survived)
        except BaseException:
            await server.close()
            raise
        return server


async def check_sandbox(settings: SandboxSection) -> Mode:
    """Return the mode that works on this host. Raises SandboxUnavailable."""
    sandbox = Sandbox(settings)
    try:
        await sandbox.start()
    finally:
        await sandbox.close()
    assert sandbox.mode is not None, "it has started"
    return sandbox.mode
