"""Starts a run's processes, waits until they are healthy, restarts those that exit, and stops them in order."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from quartet_common.log import get_logger
from quartet_local.config import LaunchError, LauncherSection
from quartet_local.process import Process, RedisProcess, exit_reason, was_killed

log = get_logger(__name__)

_CONFIGURATION_ERROR = 2
_POLL_SECONDS = 0.2
_EXIT_SECONDS = 1.0  # from a process's last answer to its exit
_RESTART_PAUSE = 1.0  # seconds, times the number of restarts before

# In the order of stopping, with the seconds from SIGTERM to SIGKILL: the trainer's last checkpoint needs the broker,
# the rollout's last group the reward service and the environment service. The sum stays below the ten seconds that a
# Ctrl-C may take.
STOP_ORDER: tuple[tuple[tuple[str, ...], float], ...] = (
    (("trainer", "rollout"), 5.0),
    (("reward", "broker", "environment"), 2.0),
    (("redis",), 1.5),
)


async def _never(name: str, status: int) -> bool:
    return False


class Supervisor:
    """The processes of a run.

    Args:
        processes: by name; the embedded Redis, if any, is "redis".
        say: prints a line on the terminal.
        hurry: when it is set, `stop` kills immediately.
    """

    def __init__(
        self,
        processes: dict[str, Process],
        settings: LauncherSection,
        say: Callable[[str], None],
        hurry: asyncio.Event,
    ):
        self._processes = processes
        self._settings = settings
        self._say = say
        self._hurry = hurry

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all processes."""
        return tuple(self._processes)

    def log_of(self, name: str) -> Path:
        """Return the log file of a process."""
        return self._processes[name].log

    async def start(self, *names: str) -> None:
        """Start those of the named processes that do not run, and return when all answer.

        One that is killed by a signal meanwhile is started again, once.

        Raises:
            LaunchError: one exited or did not answer in time. The caller stops the others with `stop`.
        """
        ended = [name for name in names if not self._processes[name].running]
        for name in ended:
            self._processes[name].start()
        waits = [asyncio.create_task(self._until_answers(name)) for name in ended]
        try:
            for wait in asyncio.as_completed(waits):
                await wait
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _until_answers(self, name: str) -> None:
        """Wait for one process. Raises LaunchError if it exits or does not answer in time."""
        process, started, timeout = self._processes[name], time.monotonic(), self._settings.start_timeout_seconds
        try:
            async with asyncio.timeout(timeout):
                await process.until_answers()
                if not process.running and was_killed(status := await process.wait()) and self._settings.restart:
                    self._say(f"{name} {exit_reason(status)} while starting; starting it again")
                    process.start()
                    await process.until_answers()
        except TimeoutError:
            raise LaunchError(
                f"{name} did not answer within {timeout:.0f} s (launcher.start_timeout_seconds); "
                f"its log is {process.log}"
            ) from None
        if not process.running:
            status, words = await process.wait(), process.last_words()
            if status == _CONFIGURATION_ERROR:
                raise LaunchError(words, status)
            raise LaunchError(f"{name} {exit_reason(status)} while starting: {words} (log: {process.log})")
        self._say(f"{name} ready after {time.monotonic() - started:.1f} s")

    async def keep_up_until(
        self,
        done: asyncio.Task,
        end_was_due: Callable[[str, int], Awaitable[bool]] = _never,
        steps: Callable[[], int] = lambda: 0,
    ) -> None:
        """Restart processes that exit, until the task is done. Raises what the task raises.

        Args:
            end_was_due: whether the exit of a process (name, exit status) was expected.
            steps: returns the steps that the run has done; a new step resets the count of restarts.

        Raises:
            LaunchError: one reached the limit of restarts, or failed to start.
        """
        keeping = [asyncio.create_task(self._keep(name, end_was_due, steps)) for name in self.names]
        pending = {done, *keeping}
        try:
            while done in pending:
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        finally:
            for task in (done, *keeping):
                task.cancel()
            await asyncio.gather(done, *keeping, return_exceptions=True)

    async def _keep(
        self, name: str, end_was_due: Callable[[str, int], Awaitable[bool]], steps: Callable[[], int]
    ) -> None:
        process, failure, furthest = self._processes[name], "", steps()
        while True:
            status = await process.wait()
            if await end_was_due(name, status):
                return
            if steps() > furthest:
                process.restarts, failure, furthest = 0, "", steps()
            what = f"{name} {process.hung or exit_reason(status)}"
            words = process.last_words()
            log.warning("%s: %s", what, words)
            if not self._settings.restart:
                raise LaunchError(f"{what} (launcher.restart is off): {words}")
            if status in (1, _CONFIGURATION_ERROR) and words == failure:
                raise LaunchError(f"{what} twice: {words} (log: {process.log})", status)
            failure = words
            if process.restarts >= self._settings.max_restarts:
                raise LaunchError(f"{what} after {process.restarts} restarts: {words} (log: {process.log})")
            process.restarts += 1
            self._say(f"{what}; starting it again ({process.restarts} of {self._settings.max_restarts})")
            await asyncio.sleep(_RESTART_PAUSE * (process.restarts - 1))
            if name == "broker":
                await self._until_redis_answers()  # a broker without Redis exits
            try:
                await self.start(name)
            except LaunchError:
                if process.running:
                    raise  # it runs but does not answer; one that exited is handled by the next round

    async def _until_redis_answers(self) -> None:
        """Wait for the embedded Redis, if any: it may be restarting, too."""
        redis = self._processes.get("redis")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.start_timeout_seconds):
                while isinstance(redis, RedisProcess) and not await redis.answers():
                    await asyncio.sleep(_POLL_SECONDS)

    async def wait(self, name: str, timeout: float) -> bool:
        """Wait for a process to exit by itself; return whether it did in time."""
        process = self._processes[name]
        if process.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await process.wait()
        return not process.running

    async def start_ended(self, *names: str) -> None:
        """Restart, one after the other, those that have exited or exit within a second. Raises LaunchError."""
        for name in names:
            if name in self._processes and await self.wait(name, _EXIT_SECONDS):
                await self.start(name)

    async def stop(self) -> None:
        """Stop all in `STOP_ORDER`; a process that exceeds its grace is killed with its descendants."""
        for kinds, grace in STOP_ORDER:
            running = [process for process in self._processes.values() if process.kind in kinds]
            await asyncio.gather(*(process.stop(grace, self._hurry) for process in running))
