"""Redis and the four services of a run, each a process that can be replaced by one of another build."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from another_build import ROOT, Build

from quartet_client import AsyncClient
from quartet_client.events import RunEvent, StepFinished
from quartet_client.models import Run

sys.path.append(str(ROOT / "tests" / "integration"))
from by_hand import ENVIRONMENTS, SERVICES, ByHand, overriding, write_sums  # noqa: E402, F401 (beside the other suite's)

RUN = "upgraded"
SECONDS = 300.0  # timeout of every wait


class LiveRun(ByHand):
    """The processes of a run and its configuration.

    Args:
        folder: for data, logs, checkpoints.
        model: the initial policy.
        pythons: the environments' interpreters, which can run each build.
        addresses: of the services by kind; default: free ports of this host.
        settings: more keys of the run file.
        within: returns, for a process's name and command line, the command line that runs it on its host.
        own: keys of the run file for one process only, by its name, e.g. its certificate.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        pythons: Mapping[str, Path],
        addresses: Mapping[str, str] | None = None,
        settings: Mapping[str, object] | None = None,
        within: Callable[[str, list], list] = lambda name, command: command,
        own: Mapping[str, Mapping[str, object]] | None = None,
    ):
        data = folder / "train.jsonl"
        write_sums(data)
        keys: dict[str, object] = {
            "run.id": RUN,
            "run.folder": folder / "run",
            "run.group_size": 2,
            "run.groups_per_step": 2,
            "run.max_steps": 1_000_000,  # never reached: the prompts end before
            "run.partial_batch": "train",
            "run.max_queued_prompts": 16,
            "model.path": model,
            "data.train": data,
            "data.passes": 0,
            "data.evaluation": "{}",
            "server.metrics": "false",
            "rollout.engine": "transformers",
            "rollout.transformers.place": "thread",
            "trainer.evaluation.interval": 0,
            "trainer.evaluation.sets": "[]",
            "trainer.checkpoint.interval": 3,
            **(settings or {}),
        }
        super().__init__(folder, ROOT / "examples" / "arithmetic" / "run.toml", pythons, keys, addresses)
        self._within, self._own = within, own or {}

    def _of(self, name: str) -> list[str]:
        return [*self.arguments, *overriding(self._own.get(name, {}))]

    def start(self, kind: str, build: Build | None = None) -> None:
        """Start a service from a build."""
        self._start(kind, [self.pythons[kind], "-m", f"quartet_{kind}", *self._of(kind)], build)

    def attach(self, build: Build | None = None) -> None:
        """Start `quartet run --attach`, which creates or finds the run, submits its data and shows progress."""
        command = [ENVIRONMENTS / "client" / "bin" / "quartet", "run", "--attach", "--plain", *self._of("client")]
        self._start("client", command, build)

    def audit(self) -> subprocess.CompletedProcess:
        """Run `quartet audit`."""
        command = [ENVIRONMENTS / "client" / "bin" / "quartet", "audit", RUN, "--config", *self._of("client")]
        command = self._within("client", command)
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False)

    async def until(self, what: str, true: Callable[[], Awaitable[object]]) -> None:
        """Wait for a condition. Raises AssertionError on a timeout, or if a process exits."""
        deadline = time.monotonic() + SECONDS
        while not await true():
            self.must_run()
            assert time.monotonic() < deadline, f"{what}: not within {SECONDS:.0f} s\n{self.logs()}"
            await asyncio.sleep(0.1)

    async def begin(self, client: AsyncClient) -> None:
        """Start `quartet run --attach` and wait until it has created the run."""
        self.attach()

        async def is_made() -> bool:
            return RUN in {run.run_id for run in await client.list_runs()}

        await self.until("the run is made", is_made)

    async def finish(self, client: AsyncClient) -> Run:
        """Stop the client by SIGINT, end the run's prompts, wait until the run ends, and audit it."""
        status = await asyncio.to_thread(self.stop, "client", signal.SIGINT)
        assert status == 130, f"the feeder ended with {status}: {self.log('client')[-2000:]}"
        await client.end_prompts(RUN)
        status = await asyncio.to_thread(self.processes["trainer"].wait, SECONDS)
        assert status == 0, f"the trainer ended with {status}: {self.log('trainer')[-2000:]}"
        run = await client.get_run(RUN)
        assert run.state == "succeeded", run
        audit = await asyncio.to_thread(self.audit)
        assert audit.returncode == 0, audit.stdout + audit.stderr
        assert f"{run.stats.committed} exactly once, 0 lost, 0 twice, 0 stuck" in audit.stdout, audit.stdout
        return run

    def must_run(self) -> None:
        """Raise AssertionError if a process has exited by itself."""
        for name, process in list(self.processes.items()):  # install.sh may exchange one meanwhile
            assert process.poll() is None, f"{name} ended with {process.returncode}\n{self.logs()}"

    def _start(self, name: str, command: list, build: Build | None = None) -> None:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **(build.environment() if build else {})}
        super()._start(name, self._within(name, command), cwd=self.folder, env=variables)


class EventWaiter:
    """Collects the run's events and waits for them."""

    def __init__(self, live: LiveRun, client: AsyncClient):
        self._live = live
        self._events: list[RunEvent] = []
        self._reading = asyncio.create_task(self._read(client))

    async def until(self, what: str, wanted: Callable[[list[RunEvent]], object]) -> list[RunEvent]:
        """Wait until `wanted` accepts the events from now on; return these. Raises AssertionError."""
        begin = len(self._events)

        async def has_come() -> object:
            assert not self._reading.done(), f"the run ended before: {what}"
            return wanted(self._events[begin:])

        await self._live.until(what, has_come)
        print(what, flush=True)
        return self._events[begin:]

    async def _read(self, client: AsyncClient) -> None:
        async for event in client.watch(RUN):
            self._events.append(event)

    async def close(self) -> None:
        """Stop collecting. Raises the error that ended it, if any."""
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading


def steps(count: int) -> Callable[[list[RunEvent]], bool]:
    """Return a condition for `EventWaiter.until`: `count` steps were trained."""
    return lambda events: sum(isinstance(event.what, StepFinished) for event in events) >= count
