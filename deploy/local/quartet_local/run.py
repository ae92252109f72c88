"""`quartet run FILE.toml` on one machine. `Launch` and `launched` also serve `quartet eval`, and `launched` `quartet
sweep`: they supervise services and stop them on a signal or an error."""

import asyncio
import fcntl
import logging
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc

from quartet_client.async_client import AsyncClient
from quartet_client.audit import audit_run, checkpoint_folder
from quartet_client.errors import QuartetError
from quartet_client.feed import create_or_extend, feed_and_watch
from quartet_client.progress import RunProgress
from quartet_client.terminal import Terminal, echo, print_error
from quartet_client.view import RunView
from quartet_common.config import ConfigError, LoadedConfig
from quartet_common.log import json_formatter
from quartet_common.run_file import run_file_text
from quartet_local.config import LaunchError, LauncherSection
from quartet_local.dry_runs import service_command
from quartet_local.preflight import Plan, check_run, download_model
from quartet_local.process import Process, RedisProcess, socket_folder
from quartet_local.supervisor import Supervisor

_DRAIN_SECONDS = 4.0  # the services' own limit, below that of supervisor.STOP_ORDER


class Work:
    """What `launched` does: it says things on a console, and a signal stops it.

    Attributes:
        hint: returns the end of an error message, or what to print after a signal.
        hurry: when it is set, running processes are killed.
    """

    def __init__(self, console: Terminal):
        self.console = console
        self.hint: Callable[[], str] = lambda: ""
        self.hurry = asyncio.Event()

    def say(self, line: str) -> None:
        """Print a line on the terminal, above the live display if there is one."""
        self.console.print(line, soft_wrap=True)


class Launch(Work):
    """The services of one run file, `config`, on this machine, and the console for messages about them."""

    def __init__(self, plan: Plan, console: Terminal):
        super().__init__(console)
        self.plan = plan
        self.config = plan.config
        self.folder = plan.config.run.path

    def client(self) -> AsyncClient:
        """Return a client of the services."""
        return AsyncClient(**self.config.addresses.model_dump(), security=self.config.security)

    @asynccontextmanager
    async def services(self) -> AsyncIterator[Supervisor]:
        """Start Redis, unless the run file names one; yield a supervisor of the services; stop them at the end."""
        services = self.plan.services
        drain = f"server.drain_seconds={min(self.config.server.drain_seconds, _DRAIN_SECONDS)}"
        overrides = [*self.plan.overrides, drain, *await download_model(self.plan, self.say)]
        for service in services:
            if service.gpus:
                self.say(f"{service.name}: {', '.join(map(str, service.gpus))}")
            if service.kind == "trainer" and "trainer.weights.sleep_rollouts=true" in service.settings:
                self.say("the rollout sleeps while a step is trained (launcher.colocate)")
        logs = self.folder / "logs"
        with (
            _private_files(),
            _locked(self.folder),
            _logging_to(logs / "launcher.log"),
            socket_folder(self.folder) as sockets,
        ):
            processes: dict[str, Process] = {}
            if self.plan.redis_server:
                memory = self.config.section.embedded_redis_memory
                server = self.plan.redis_server
                redis = RedisProcess(server, self.folder / "redis", logs / "redis.log", sockets, memory)
                processes["redis"] = redis
                overrides.append(f'broker.redis_url="{redis.url}"')
            for service in services:
                command = [*service_command(service, self.config.path, overrides), "--log-format", "json"]
                log, hang_seconds = logs / f"{service.name}.log", self.config.section.hang_seconds
                process = Process(service.name, command, log, service.kind, service.environment, hang_seconds)
                processes[service.name] = process
            supervisor = Supervisor(processes, self.config.section, self.say, self.hurry)
            try:
                if self.plan.redis_server:
                    await supervisor.start("redis")
                yield supervisor
            finally:
                await supervisor.stop()


WorkT = TypeVar("WorkT", bound=Work)


def launched(make: Callable[[], WorkT], work: Callable[[WorkT], Coroutine[Any, Any, int]]) -> int:
    """Do work with the launch that `make` returns and return its exit status. Errors are printed to standard error."""
    launch: WorkT | None = None
    for number in (signal.SIGTERM, signal.SIGHUP):  # while it is checked; `_until_signal` has its own handlers
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        launch = make()
        return asyncio.run(_until_signal(launch, work(launch)))
    except (ConfigError, QuartetError, LaunchError) as error:
        print_error(error, launch.hint() if launch else "")
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        return 130


async def _until_signal(launch: Work, work: Coroutine[Any, Any, int]) -> int:
    """Do the work. The first signal cancels it, which stops the services in order; the second kills them."""
    loop = asyncio.get_running_loop()
    received: list[int] = []
    working = asyncio.create_task(work)

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            working.cancel()  # before it is said: after SIGHUP the terminal is gone, and writing to it fails
            launch.say("stopping …")
        else:
            launch.hurry.set()
            launch.say("killing what is left …")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(number, on_signal, number)
    try:
        return await working
    except asyncio.CancelledError:
        if not received:
            raise
        if hint := launch.hint():
            launch.say(hint.removeprefix("; "))
        return 128 + received[0]


@contextmanager
def _private_files() -> Iterator[None]:
    """Set this process's umask: no other user can read prompts, completions or weights that it or a service writes."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the run's folder. Raises LaunchError if another launcher holds it."""
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
    """Write this process's log to a file, one JSON object per line, and nothing to the terminal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(json_formatter())
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
"""In the run's folder: the run file with all overrides and the chosen addresses."""

_LAST_WORK_SECONDS = 120.0  # from a run's success to the trainer's exit: checkpoint, final model
_GIVEN_UP_SECONDS = 20.0  # the same after a run that failed or was cancelled
_END_NOTICE_SECONDS = 10.0  # from the trainer's exit to the broker's event of the run's end


def run(path: Path, overrides: Sequence[str] = (), plain: bool = False) -> int:
    """Run a run file with all services on this machine and return the exit status.

    0: the run succeeded; 1: it or its audit failed; 2: bad configuration or data; 128 + n: signal n (130: Ctrl-C).
    Errors are printed to standard error, and no process is left running.
    """

    def make() -> Launch:
        plan = check_run(path, overrides, echo)
        if plan.held:
            config = plan.config
            where = "; ".join(f"{kind} {address}" for kind, address in config.addresses.model_dump().items())
            echo(f"{plan.held}; this run has its own: {where} (--config {config.run.path / RUN_FILE})")
        return Launch(plan, Terminal())

    return launched(make, partial(_run, plain=plain))


async def _run(launch: Launch, plain: bool) -> int:
    """Submit the data, show progress and restart services until the run and the trainer end; return the exit status."""
    config, data = launch.config, launch.plan.data
    model = config.model.path.name if config.model.path else ""
    progress = RunProgress(config.run.id, model=model, max_steps=config.run.max_steps)
    view = RunView(progress, launch.console, plain or config.section.plain or None)

    def again() -> str:
        if progress.ended:
            return ""
        settings = (word for override in launch.plan.asked for word in ("--set", override))
        return f"; the run goes on with: {shlex.join(['quartet', 'run', str(config.path), *settings])}"

    async with launch.services() as supervisor, launch.client() as client:
        (launch.folder / RUN_FILE).write_text(run_file_text(config.file.tree), encoding="utf-8")
        if not launch.plan.redis_server:
            await supervisor.start("broker")
            await _refuse_other_trainer(config, client)
        if (launch.folder / "metrics.jsonl").exists():
            # The trainer exits if its run has ended, so an earlier run is resumed before the trainer starts.
            await supervisor.start("broker")
            await create_or_extend(config, data, client)
        rollouts = [service.name for service in launch.plan.services if service.kind == "rollout"]
        async with _background(supervisor.start(*rollouts)) as loading:  # an engine may be imported before they answer
            progress.coming.update({"rollout"} if rollouts else ())
            await supervisor.start(*(name for name in supervisor.names if name not in rollouts))
            launch.hint = again
            async with _background(feed_and_watch(config, data, client, view)) as showing:
                await asyncio.wait({loading, showing}, return_when=asyncio.FIRST_COMPLETED)
                if loading.done():
                    loading.result()
                due = partial(end_was_due, progress, showing)
                await supervisor.keep_up_until(showing, due, lambda: progress.steps_done)
        sound = await _end(launch, supervisor, progress)
    # What a run that succeeded says after the count of its steps is a warning.
    more = progress.reason.partition("; ")[2] if progress.succeeded else progress.reason
    reason = f": {more}" if more else ""
    done = f"run {progress.run_id} {progress.state} after {progress.steps_done} steps{reason}"
    launch.say(f"{done}; all of it is in {launch.folder}")
    return 0 if progress.succeeded and sound else 1


async def _refuse_other_trainer(config: LoadedConfig[LauncherSection], client: AsyncClient) -> None:
    """Raise LaunchError if a trainer works for the run elsewhere: started again, each would take it from the other."""
    try:
        run = await client.get_run(config.run.id)
    except QuartetError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
        return
    for member in run.members:
        if run.active and member.kind == "trainer" and member.address != config.addresses.trainer:
            raise LaunchError(
                f"run.id: the Redis of broker.redis_url has a run '{run.run_id}' that {member.instance_id} trains at "
                f"{member.address}; stop that trainer, watch its run with --attach, or give this run another id",
                2,
            )


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Do the work in a task, which is cancelled at the end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def end_was_due(progress: RunProgress, showing: asyncio.Future[None], name: str, status: int) -> bool:
    """Return whether a process's exit was expected: the run has ended and its last events do not need the process."""
    if name == "trainer" and status == 0:  # it reported the run's end to the broker before its exit
        await asyncio.wait([showing], timeout=_END_NOTICE_SECONDS)
    needed_for_events = name in ("redis", "broker") and not showing.done()
    return progress.ended and not needed_for_events


async def _end(launch: Launch, supervisor: Supervisor, progress: RunProgress) -> bool:
    """Wait for the trainer's exit and audit a run that succeeded; return whether the audit found no fault."""
    timeout = _LAST_WORK_SECONDS if progress.succeeded else _GIVEN_UP_SECONDS
    if not await supervisor.wait("trainer", timeout):
        log = supervisor.log_of("trainer")
        launch.say(f"the trainer did not exit within {timeout:.0f} s of the run's end; its log is {log}")
    elif progress.succeeded:
        try:
            return await _audit(launch)
        except QuartetError:  # services are not restarted after the run's end: Redis or the broker may have been killed
            await supervisor.start_ended("redis", "broker")
            try:
                return await _audit(launch)
            except QuartetError as error:
                launch.say(f"the audit could not be made: {error}")
    return True


async def _audit(launch: Launch) -> bool:
    """Check with the broker that each group counted exactly once, and print the report. Raises QuartetError."""
    config = launch.config
    folder = checkpoint_folder(config.path, launch.plan.overrides, config.run.id)
    async with launch.client() as client:
        report = await audit_run(client, config.run.id, folder)
    for line in (f"audit of {report.sentence()}", *(f"  {fault}" for fault in report.faults)):
        launch.say(line)
    return report.ok
