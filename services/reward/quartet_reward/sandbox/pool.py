"""The sandbox of one mode: its fork server, its slots, and the jobs that have them."""

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

from quartet_common.log import get_logger
from quartet_reward import metrics
from quartet_reward.config import Mode, SandboxSection
from quartet_reward.errors import ShuttingDown
from quartet_reward.queue import FairQueue, Grant
from quartet_reward.sandbox.api import Execution, Job, KilledFromOutside, SandboxUnavailable
from quartet_reward.sandbox.run import JobRun
from quartet_reward.sandbox.server_handle import ServerHandle, Users

log = get_logger(__name__)

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.2, 10.0
_Ended = TypeVar("_Ended")


class IsolatedSandbox:
    """A fork server and its slots; as root, each slot has a user of its own.

    Runs take turns at the slots: the one that has used least goes next.
    """

    def __init__(self, settings: SandboxSection, mode: Mode, queue_seconds: float = 300.0):
        """Prepare; `start` starts. `queue_seconds`: longest wait for a slot."""
        self._settings = settings
        self._queue_seconds = queue_seconds
        self._names = itertools.count()
        self._server: ServerHandle | None = None
        self._up = asyncio.Event()
        self._slots: FairQueue[int] = FairQueue("code")
        self._slots.offer(*range(settings.slots))
        self._keeper: asyncio.Task | None = None
        self._endings: set[asyncio.Task] = set()
        self._closed = False
        self.survivors = 0
        """Executions after whose end somebody still held their pipes."""
        self._mode = mode
        self._root = os.geteuid() == 0
        self._users: Users | None = None

    @property
    def mode(self) -> str:
        return self._mode.value

    @property
    def fork_server(self) -> int | None:
        """Its process id, None while none serves."""
        return self._server.pid if self._server and self._up.is_set() else None

    @property
    def waiting(self) -> int:
        return self._slots.waiting

    @property
    def running(self) -> int:
        return self._slots.running

    async def start(self) -> None:
        """Start the fork server. Raises SandboxUnavailable if it cannot."""
        if self._root:
            self._users = Users(self._settings.first_uid, 1 + self._settings.slots)
        self._keeper = asyncio.create_task(self._keep())
        up = asyncio.create_task(self._up.wait())
        try:
            await asyncio.wait([self._keeper, up], return_when=asyncio.FIRST_COMPLETED)
            if self._keeper.done():  # only if the first fork server cannot start
                self._keeper.result()
        except BaseException:
            await self.close()
            raise
        finally:
            up.cancel()

    async def run(self, job: Job) -> Execution:
        """See `LazySandbox.run`."""
        execution = await _twice_if_killed(lambda: self._run(job))
        _count(execution)
        return execution

    async def run_judged(self, judge: Job, candidate: Job) -> tuple[Execution, Execution]:
        """See `LazySandbox.run_judged`."""
        executions = await _twice_if_killed(lambda: self._run_judged(judge, candidate))
        _count(*executions)
        return executions

    async def _run(self, job: Job) -> Execution:
        grant = await self._take(1)
        try:
            run = await self._begin(grant.thing, job, report=job.entry == "judge")  # of a checker program
        except BaseException:
            self._give_back(grant)
            raise
        self._give_back(grant, run)
        try:
            await run.ended.wait()
        finally:
            run.kill(None)
        return run.execution()

    async def _run_judged(self, judge: Job, candidate: Job) -> tuple[Execution, Execution]:
        grant = await self._take(2)
        ours, theirs = socket.socketpair()
        runs: list[JobRun] = []
        try:
            with ours, theirs:
                runs.append(await self._begin(grant.things[0], candidate, theirs.fileno()))
                runs.append(await self._begin(grant.things[1], judge, ours.fileno(), report=True))
            await runs[1].ended.wait()
            runs[0].kill(None)
            await runs[0].ended.wait()
        finally:
            for run in runs:
                run.kill(None)
            self._give_back(grant, *runs)
        return runs[1].execution(), runs[0].execution()

    async def _take(self, count: int) -> Grant[int]:
        """Wait for slots, together or not at all. Raises SandboxUnavailable, ShuttingDown."""
        try:
            return await self._slots.take(timeout=self._queue_seconds, count=count)
        except TimeoutError:
            raise SandboxUnavailable(f"no slot became free within {self._queue_seconds:g} s") from None

    async def close(self) -> None:
        """Kill everything that runs and free what is held."""
        self._closed = True
        self._slots.close()
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._server:
            await self._server.close()
        await asyncio.gather(*self._endings)
        if self._users:
            self._users.release()

    async def _begin(self, slot: int, job: Job, pair: int | None = None, report: bool = False) -> JobRun:
        if self._closed:
            raise ShuttingDown
        try:
            async with asyncio.timeout(_LAST_RETRY_SECONDS):
                await self._up.wait()
        except TimeoutError:
            raise SandboxUnavailable("the fork server does not start") from None
        server = self._server
        assert server is not None, "it is up"
        if job.entry not in server.entries:
            raise ValueError(f"there is no entry {job.entry!r}; there are {', '.join(sorted(server.entries))}")
        # Without users of its own, a fork server takes no notice of this.
        uid = 1 + slot if self._root and self._mode is not Mode.NAMESPACES else 0
        return JobRun(next(self._names), server, uid, job, pair, report)

    def _give_back(self, grant: Grant[int], *runs: JobRun) -> None:
        """The slots are free again when the runs' process trees are gone, whoever still waits for them."""

        async def when_ended() -> None:
            for run in runs:
                await run.ended.wait()
                self.survivors += run.survived
            self._slots.settle(grant)

        task = asyncio.create_task(when_ended())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _keep(self) -> None:
        """Keep a fork server alive. Raises SandboxUnavailable if the first one cannot start."""
        first = self._users.first if self._users else 0
        uids = range(first, first + 1 + self._settings.slots) if self._users else range(0)
        started, delay = False, _FIRST_RETRY_SECONDS
        while True:
            server = ServerHandle(self._mode, uids, self._settings.packages, self._settings.python)
            self._server = server
            failed = False
            try:
                await server.await_ready()
                self._up.set()
                started, delay = True, _FIRST_RETRY_SECONDS
                await server.gone.wait()
                log.error("a fork server died and is started again", extra={"reason": server.last_words})
            except SandboxUnavailable as error:
                if not started:
                    raise
                log.error("a fork server does not start", extra={"reason": str(error)})
                failed = True
            finally:
                self._up.clear()
            await server.close()
            if failed:
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY_SECONDS)


def _count(*executions: Execution) -> None:
    for execution in executions:
        metrics.EXECUTIONS.labels(execution.ending.value).inc()


async def _twice_if_killed(attempt: Callable[[], Awaitable[_Ended]]) -> _Ended:
    try:
        return await attempt()
    except KilledFromOutside as error:
        log.warning("a program is run again", extra={"reason": str(error)})
        return await attempt()
