"""`quartet run FILE.toml` on one machine: check everything, start everything, show the run, stop everything."""

import asyncio
import fcntl
import logging
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ConfigDict
from pythonjsonlogger.json import JsonFormatter
from rich.console import Console

from quartet_client.async_client import AsyncClient
from quartet_client.attach import feed_and_watch
from quartet_client.audit_sources import audit_run, checkpoint_folder
from quartet_client.data import RunData
from quartet_client.errors import QuartetError
from quartet_client.progress import RunProgress
from quartet_client.view import RunView
from quartet_common.config import ConfigError, LoadedConfig, Section, load_config
from quartet_local.checkout import SERVICES, ensure_environments
from quartet_local.config import LaunchError, LauncherSection
from quartet_local.preflight import check_services, service_command
from quartet_local.process import Process
from quartet_local.redis import redis_process
from quartet_local.supervisor import Supervisor

_DRAIN_SECONDS = 4.0  # the services' own limit, under that of supervisor.STOP_ORDER
_LAST_WORK_SECONDS = 120.0  # for the trainer's end after the run's: checkpoint, final model
_GIVEN_UP_SECONDS = 20.0  # for its end after a run that failed or was cancelled
_END_NOTICE_SECONDS = 10.0  # between a trainer's exit and the run's end in the broker's events


class _BrokerSection(Section):
    """The one key of [broker] that matters here."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    redis_url: str | None = None


def run(config_path: Path | str | None, overrides: Sequence[str] = (), plain: bool = False) -> int:
    """Run a run file with all services on this machine and return the exit status.

    0: the run succeeded; 1: it failed, or its audit did; 2: bad configuration or data, nothing was left running;
    128 + n: signal n (130: Ctrl-C). Whatever goes wrong is one sentence on standard error, and no process is left
    behind.
    """
    path = Path(config_path) if config_path is not None else None
    launch: _Launch | None = None
    try:
        config = load_config("launcher", LauncherSection, path, overrides)
        data = RunData.load(config)
        ensure_environments()
        launch = _Launch(config, data, list(overrides), plain or config.section.plain)
        return asyncio.run(_until_signal(launch))
    except (ConfigError, QuartetError, LaunchError) as error:
        print(f"quartet: {error}{launch.goes_on if launch else ''}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        return 130


async def _until_signal(launch: "_Launch") -> int:
    """Run it; the first signal stops it in order, the second at once."""
    loop = asyncio.get_running_loop()
    received: list[int] = []
    work = asyncio.create_task(launch.run())

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            launch.say("stopping …")
            work.cancel()
        else:
            launch.say("killing what is left …")
            launch.hurry()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        if launch.goes_on:
            launch.say(launch.goes_on.removeprefix("; "))
        return 128 + received[0]


class _Launch:
    def __init__(self, config: LoadedConfig[LauncherSection], data: RunData, overrides: list[str], plain: bool):
        self._config = config
        self._data = data
        self._overrides = overrides
        self._folder = config.run.path
        self._console = Console(highlight=False)
        model = config.model.path.name if config.model.path else ""
        self._progress = RunProgress(config.run.id, model=model, max_steps=config.run.max_steps)
        self._view = RunView(self._progress, self._console, plain or None)
        self._supervisor: Supervisor | None = None
        self._sound = True
        self._made = False  # the run at the broker

    def say(self, line: str) -> None:
        """Tell the person at the terminal a line, above the live picture if there is one."""
        self._console.print(line, markup=False, soft_wrap=True)

    @property
    def goes_on(self) -> str:
        """The end of a sentence about a run that was left before its end: how it is taken up again; else nothing."""
        if not self._made or self._progress.ended:
            return ""
        settings = (word for override in self._overrides for word in ("--set", override))
        return f"; the run goes on with: {shlex.join(['quartet', 'run', str(self._config.path), *settings])}"

    def hurry(self) -> None:
        """Kill what is still running."""
        if self._supervisor:
            self._supervisor.hurry.set()

    async def run(self) -> int:
        """Return the exit status. Raises what `run` tells of."""
        path, overrides = self._config.path, [*self._overrides, *self._additions()]
        own_redis = load_config("broker", _BrokerSection, path, self._overrides).section.redis_url is None
        self.say("checking the run file with every service")
        # The broker's check wants a Redis that answers: an embedded one is started only when the others are satisfied.
        await check_services(SERVICES[1:] if own_redis else SERVICES, path, overrides)
        with _locked(self._folder), _logging_to(self._folder / "logs" / "launcher.log"):
            processes: dict[str, Process] = {}
            redis_url = None
            if own_redis:
                log, port = self._folder / "logs" / "redis.log", self._config.section.embedded_redis_port
                processes["redis"], redis_url = redis_process(self._folder / "redis", log, port)
                overrides.append(f'broker.redis_url="{redis_url}"')
            for name in SERVICES:
                command = [*service_command(name, path, overrides), "--log-format", "json"]
                processes[name] = Process(name, command, self._folder / "logs" / f"{name}.log")
            config = self._config
            self._supervisor = Supervisor(
                processes, redis_url, config.addresses, config.security, config.section, self.say
            )
            try:
                if own_redis:
                    await self._supervisor.start("redis")
                    await check_services(("broker",), path, overrides)
                await self._supervisor.start(*SERVICES)
                await self._follow(self._supervisor)
            finally:
                await self._supervisor.stop()
        return self._told()

    def _additions(self) -> list[str]:
        """Settings that make the services' drain fit into the launcher's."""
        server = self._config.server
        seconds = min(server.drain_seconds, _DRAIN_SECONDS)
        return [f"server.drain_seconds={seconds}"]

    async def _follow(self, supervisor: Supervisor) -> None:
        """Feed the run and show it, and keep the services up, until the run has ended and the trainer with it."""
        config = self._config
        async with AsyncClient(**config.addresses.model_dump(), security=config.security) as client:
            self._made = True
            showing = asyncio.create_task(feed_and_watch(config, self._data, client, self._view))

            async def end_was_due(name: str, status: int) -> bool:
                if name == "trainer" and status == 0:  # it tells the broker of the run's end before it goes
                    await asyncio.wait([showing], timeout=_END_NOTICE_SECONDS)
                return self._progress.ended

            keeping = [
                asyncio.create_task(supervisor.keep(name, end_was_due, lambda: self._progress.steps_done))
                for name in supervisor.names
            ]
            try:
                await _until_done(showing, keeping)
            finally:
                for task in (showing, *keeping):
                    task.cancel()
                await asyncio.gather(showing, *keeping, return_exceptions=True)
        patience = _LAST_WORK_SECONDS if self._progress.succeeded else _GIVEN_UP_SECONDS
        if not await supervisor.wait("trainer", patience):
            self.say(
                f"the trainer did not end within {patience:.0f} s of the run; its log is {supervisor.log_of('trainer')}"
            )
        elif self._progress.succeeded:
            await self._audit()

    async def _audit(self) -> None:
        """Prove, while the broker still stands, that each group counted exactly once."""
        config = self._config
        folder = checkpoint_folder(config.path, self._overrides, config.run.id)
        try:
            async with AsyncClient(**config.addresses.model_dump(), security=config.security) as client:
                report = await audit_run(client, config.run.id, folder)
        except QuartetError as error:
            self.say(f"the audit could not be made: {error}")
            return
        self._sound = report.ok
        for line in (f"audit of {report.sentence()}", *(f"  {fault}" for fault in report.faults)):
            self.say(line)

    def _told(self) -> int:
        """Say how the run ended; return the exit status."""
        state = self._progress
        reason = f": {state.reason}" if state.reason and not state.succeeded else ""
        self.say(
            f"run {state.run_id} {state.state} after {state.steps_done} steps{reason}; all of it is in {self._folder}"
        )
        return 0 if state.succeeded and self._sound else 1


async def _until_done(main: asyncio.Task, others: list[asyncio.Task]) -> None:
    """Wait for the main task, or for the first failure of any."""
    pending = {main, *others}
    while main in pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second launcher out of the run's folder. Raises LaunchError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "launcher.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"run.folder: another launcher is at work in {folder}; give this run another id", 2
            ) from None
        yield


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write this process's log to a file, one JSON object a line, and nothing of it to the terminal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {"asctime": "time", "levelname": "level", "name": "logger"}
    handler = logging.FileHandler(path)
    handler.setFormatter(JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=names))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
