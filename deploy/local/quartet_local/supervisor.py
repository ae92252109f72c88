"""Keeps the processes of a run: starts them, waits for their health, restarts what dies, stops them in order."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from quartet_common.log import get_logger
from quartet_local.config import LaunchError, LauncherSection
from quartet_local.process import Process, RedisProcess, tell_exit

log = get_logger(__name__)

_CONFIGURATION_ERROR = 2
_LOOK_SECONDS = 0.2
_ENDING_SECONDS = 1.0  # from a process's last answer to its exit
_RESTART_PAUSE = 1.0  # more before each restart but the first

# Who is stopped first: the trainer's last checkpoint needs the broker, the rollout's last group the reward service.
# Seconds from SIGTERM to SIGKILL; in all they stay under the ten that a Ctrl-C may take.
STOP_ORDER: tuple[tuple[tuple[str, ...], float], ...] = (
    (("trainer", "rollout"), 5.0),
    (("reward", "broker"), 2.0),
    (("redis",), 1.5),
)


async def _never(name: str, status: int) -> bool:
    return False


class Supervisor:
    """The processes of a run.

    Args:
        processes: by name; "redis" first if there is one of ours.
        say: tells the person at the terminal a line.
        hurry: set: kill what is left at once.
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
        """Start those of the named processes that do not run, and return when all of them are healthy.

        Raises:
            LaunchError: one ended or did not become healthy in time. The others are left to `stop`.
        """
        ended = [name for name in names if not self._processes[name].running]
        for name in ended:
            self._processes[name].start()
        waits = [asyncio.create_task(self._until_healthy(name)) for name in ended]
        try:
            for wait in asyncio.as_completed(waits):
                await wait
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _until_healthy(self, name: str) -> None:
        """Wait for one process. Raises LaunchError if it ends or the time is over."""
        process, started, timeout = self._processes[name], time.monotonic(), self._settings.start_timeout_seconds
        try:
            async with asyncio.timeout(timeout):
                await process.until_ready()
        except TimeoutError:
            raise LaunchError(
                f"{name} was not healthy within {timeout:.0f} s (launcher.start_timeout_seconds); "
                f"its log is {process.log}"
            ) from None
        if not process.running:
            status, words = await process.wait(), process.last_words()
            if status == _CONFIGURATION_ERROR:
                raise LaunchError(words, status)
            raise LaunchError(f"{name} {tell_exit(status)} while starting: {words} (log: {process.log})")
        self._say(f"{name} ready after {time.monotonic() - started:.1f} s")

    async def keep_up_until(
        self,
        done: asyncio.Task,
        end_was_due: Callable[[str, int], Awaitable[bool]] = _never,
        steps: Callable[[], int] = lambda: 0,
    ) -> None:
        """Start processes again when they die, until the task is done. Raises what it raises.

        Args:
            end_was_due: whether a process (name, exit status) was to end now.
            steps: steps of the run that are done. A restart counts only as long as they are no more than before it.

        Raises:
            LaunchError: one may not be restarted any more, or did not come back.
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
            what = f"{name} {tell_exit(status)}"
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
                await self._until_redis_answers()  # without it a broker does not start
            try:
                await self.start(name)
            except LaunchError:
                if process.running:
                    raise  # it runs and does not become healthy; one that ended is looked at above

    async def _until_redis_answers(self) -> None:
        """Wait for the embedded Redis, if there is one, which may be about to be started again."""
        redis = self._processes.get("redis")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.start_timeout_seconds):
                while isinstance(redis, RedisProcess) and not await redis.answers():
                    await asyncio.sleep(_LOOK_SECONDS)

    async def wait(self, name: str, timeout: float) -> bool:
        """Wait for a process to end by itself. Return False if it did not in time."""
        process = self._processes[name]
        if process.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await process.wait()
        return not process.running

    async def start_ended(self, *names: str) -> None:
        """Start again, one after the other, those that have ended or are about to. Raises LaunchError."""
        for name in names:
            if name in self._processes and await self.wait(name, _ENDING_SECONDS):
                await self.start(name)

    async def stop(self) -> None:
        """Stop all, in order; what does not end in its time is killed, with everything it started."""
        for kinds, grace in STOP_ORDER:
            running = [process for process in self._processes.values() if process.kind in kinds]
            await asyncio.gather(*(process.stop(grace, self._hurry) for process in running))
