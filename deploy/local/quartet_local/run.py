"""`quartet run FILE.toml` on one machine: check everything, start everything, show the run, stop everything."""

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path

from quartet_client.async_client import AsyncClient
from quartet_client.audit import audit_run, checkpoint_folder
from quartet_client.data import RunData
from quartet_client.errors import QuartetError
from quartet_client.feed import feed_and_watch, take_up
from quartet_client.progress import RunProgress
from quartet_client.terminal import Terminal, echo
from quartet_client.view import RunView
from quartet_common.run_file import run_file_text
from quartet_local.launch import Launch, keep_up_until, launched
from quartet_local.preflight import Plan, check_run
from quartet_local.supervisor import Supervisor

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
                return self._progress.ended

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
