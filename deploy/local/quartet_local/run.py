"""`quartet run FILE.toml` on one machine: check, start, show, stop; and what any launch has in common: services are
started and kept up, signals and errors end everything.
"""

import asyncio
import fcntl
import logging
import os
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from pythonjsonlogger.json import JsonFormatter

from quartet_client.async_client import AsyncClient
from quartet_client.audit import audit_run, checkpoint_folder
from quartet_client.data import RunData
from quartet_client.errors import QuartetError
from quartet_client.feed import feed_and_watch, take_up
from quartet_client.progress import RunProgress
from quartet_client.terminal import Terminal, complain, echo
from quartet_client.view import RunView
from quartet_common.config import ConfigError
from quartet_common.run_file import run_file_text
from quartet_local.config import LaunchError
from quartet_local.preflight import Plan, check_run, download_model, service_command
from quartet_local.process import Process, redis_process, socket_folder
from quartet_local.supervisor import Supervisor

_DRAIN_SECONDS = 4.0  # the services' own limit, under that of supervisor.STOP_ORDER


class Launch(ABC):
    """Services of one run file on this machine, and what is done with them."""

    def __init__(self, plan: Plan, console: Terminal):
        self._plan = plan
        self._config = plan.config
        self._overrides = plan.overrides
        self._folder = plan.config.run.path
        self._console = console
        self._supervisor: Supervisor | None = None

    @abstractmethod
    async def run(self) -> int:
        """Do it all and return the exit status. Raises ConfigError, QuartetError, LaunchError."""

    @property
    def hint(self) -> str:
        """The end of the sentence about an error or a signal."""
        return ""

    def say(self, line: str) -> None:
        """Tell the person at the terminal a line, above the live picture if there is one."""
        self._console.print(line, soft_wrap=True)

    def hurry(self) -> None:
        """Kill what is still running."""
        if self._supervisor:
            self._supervisor.hurry.set()

    @asynccontextmanager
    async def services(self) -> AsyncIterator[Supervisor]:
        """The plan's services, healthy, and Redis unless the run file names one; stopped at the end."""
        config, path = self._config, self._config.path
        drain = f"server.drain_seconds={min(config.server.drain_seconds, _DRAIN_SECONDS)}"
        overrides = [*self._overrides, drain, *await download_model(self._plan, self.say)]
        services = self._plan.services
        for service in services:
            if service.gpus:
                self.say(f"{service.name}: {', '.join(map(str, service.gpus))}")
            if service.kind == "trainer" and "trainer.weights.sleep_rollouts=true" in service.settings:
                self.say("the rollout sleeps while a step is trained (launcher.colocate)")
        logs = self._folder / "logs"
        with (
            _private_files(),
            _locked(self._folder),
            _logging_to(logs / "launcher.log"),
            socket_folder(self._folder) as sockets,
        ):
            processes: dict[str, Process] = {}
            redis_url = None
            if self._plan.own_redis:
                data, log = self._folder / "redis", logs / "redis.log"
                processes["redis"], redis_url = redis_process(data, log, sockets, config.section.embedded_redis_memory)
                overrides.append(f'broker.redis_url="{redis_url}"')
            for service in services:
                command = [*service_command(service, path, overrides), "--log-format", "json"]
                log = logs / f"{service.name}.log"
                processes[service.name] = Process(
                    service.name, command, log, service.kind, environment=service.environment
                )
            self._supervisor = supervisor = Supervisor(processes, redis_url, config.section, self.say)
            try:
                if self._plan.own_redis:
                    await supervisor.start("redis")
                await self._start(supervisor, tuple(service.name for service in services))
                yield supervisor
            finally:
                await supervisor.stop()

    async def _start(self, supervisor: Supervisor, names: tuple[str, ...]) -> None:
        """Start the services, of which the broker is the first."""
        await supervisor.start(*names)


async def keep_up_until(
    done: asyncio.Task,
    supervisor: Supervisor,
    end_was_due: Callable[[str, int], Awaitable[bool]],
    steps: Callable[[], int],
) -> None:
    """Keep all processes up, see `Supervisor.keep`, until the task is done. Raises what it raises, and LaunchError."""
    keeping = [asyncio.create_task(supervisor.keep(name, end_was_due, steps)) for name in supervisor.names]
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


def launched(make: Callable[[], Launch]) -> int:
    """Run what `make` returns and return the exit status; whatever goes wrong is one sentence on standard error."""
    launch: Launch | None = None
    try:
        launch = make()
        return asyncio.run(_until_signal(launch))
    except (ConfigError, QuartetError, LaunchError) as error:
        complain(error, launch.hint if launch else "")
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        return 130


async def _until_signal(launch: Launch) -> int:
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
        if launch.hint:
            launch.say(launch.hint.removeprefix("; "))
        return 128 + received[0]


@contextmanager
def _private_files() -> Iterator[None]:
    """What this process and those it starts write meanwhile is for their user alone: prompts, completions, weights."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


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


RUN_FILE = "run.toml"
"""In the run's folder: the run file as it was run, with all overrides and the addresses that were found."""

_LAST_WORK_SECONDS = 120.0  # for the trainer's end after the run's: checkpoint, final model
_GIVEN_UP_SECONDS = 20.0  # for its end after a run that failed or was cancelled
_END_NOTICE_SECONDS = 10.0  # between a trainer's exit and the run's end in the broker's events


def run(config_path: Path | str | None, overrides: Sequence[str] = (), plain: bool = False) -> int:
    """Run a run file with all services on this machine and return the exit status.

    0: the run succeeded; 1: it failed, or its audit did; 2: bad configuration or data, nothing was left running;
    128 + n: signal n (130: Ctrl-C). Whatever goes wrong is a sentence on standard error, and no process is left behind.
    """
    path = Path(config_path) if config_path is not None else None

    def make() -> Launch:
        plan = check_run(path, overrides, echo)
        if plan.found:
            config = plan.config
            where = "; ".join(f"{kind} {address}" for kind, address in config.addresses.model_dump().items())
            echo(f"{plan.held}; this run has its own: {where} (--config {config.run.path / RUN_FILE})")
        return _RunLaunch(plan, plain or plan.config.section.plain)

    return launched(make)


class _RunLaunch(Launch):
    def __init__(self, plan: Plan[RunData], plain: bool):
        super().__init__(plan, Terminal())
        config, self._data = plan.config, plan.data
        model = config.model.path.name if config.model.path else ""
        self._progress = RunProgress(config.run.id, model=model, max_steps=config.run.max_steps)
        self._view = RunView(self._progress, self._console, plain or None)
        self._sound = True
        self._made = False  # the run at the broker

    @property
    def hint(self) -> str:
        """For a run that was left before its end: how it is taken up again."""
        if not self._made or self._progress.ended:
            return ""
        settings = (word for override in self._plan.asked for word in ("--set", override))
        return f"; the run goes on with: {shlex.join(['quartet', 'run', str(self._config.path), *settings])}"

    async def run(self) -> int:
        """See `Launch.run`."""
        async with self.services() as supervisor:
            await self._follow(supervisor)
        return self._told()

    async def _start(self, supervisor: Supervisor, names: tuple[str, ...]) -> None:
        """Start the services; a run that was here before is taken up first: a trainer ends where its run has ended."""
        config = self._config
        (self._folder / RUN_FILE).write_text(run_file_text(config.file.tree), encoding="utf-8")
        if (self._folder / "metrics.jsonl").exists():
            await supervisor.start(names[0])
            async with AsyncClient(**config.addresses.model_dump(), security=config.security) as client:
                await take_up(config, self._data, client)
            names = names[1:]
        await supervisor.start(*names)

    async def _follow(self, supervisor: Supervisor) -> None:
        """Feed the run and show it, and keep the services up, until the run has ended and the trainer with it."""
        config = self._config
        async with AsyncClient(**config.addresses.model_dump(), security=config.security) as client:
            self._made = True
            showing = asyncio.create_task(feed_and_watch(config, self._data, client, self._view))

            async def end_was_due(name: str, status: int) -> bool:
                if name == "trainer" and status == 0:  # it tells the broker of the run's end before it goes
                    await asyncio.wait([showing], timeout=_END_NOTICE_SECONDS)
                last_events_to_come = name in ("redis", "broker") and not showing.done()
                return self._progress.ended and not last_events_to_come

            await keep_up_until(showing, supervisor, end_was_due, lambda: self._progress.steps_done)
        patience = _LAST_WORK_SECONDS if self._progress.succeeded else _GIVEN_UP_SECONDS
        if not await supervisor.wait("trainer", patience):
            self.say(
                f"the trainer did not end within {patience:.0f} s of the run; its log is {supervisor.log_of('trainer')}"
            )
        elif self._progress.succeeded:
            try:
                await self._audit()
            except QuartetError:  # nothing is kept up after the run's end, and Redis or the broker was killed since
                await supervisor.start_ended("redis", "broker")
                try:
                    await self._audit()
                except QuartetError as error:
                    self.say(f"the audit could not be made: {error}")

    async def _audit(self) -> None:
        """Prove, while the broker still stands, that each group counted exactly once. Raises QuartetError."""
        config = self._config
        folder = checkpoint_folder(config.path, self._overrides, config.run.id)
        async with AsyncClient(**config.addresses.model_dump(), security=config.security) as client:
            report = await audit_run(client, config.run.id, folder)
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
