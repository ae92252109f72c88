"""Redis and the four services of a run that goes on, each a process that can be replaced by one of another build."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from another_build import ROOT, Build

from quartet_client import AsyncClient
from quartet_client.events import RunEvent, StepFinished
from quartet_client.models import Run
from quartet_common.ports import free_ports
from quartet_local.redis import find_server

ENVIRONMENTS = ROOT / ".quartet" / "envs"
KINDS = ("broker", "reward", "rollout", "trainer")
RUN = "upgraded"
STOP_SECONDS = 60.0
SECONDS = 300.0  # for anything that is waited for


def _overrides(keys: Mapping[str, object]) -> list[str]:
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


_MAKE_MODEL = """
import sys; from pathlib import Path
from model import build_model, build_tokenizer, save
save(build_model(0), build_tokenizer(), Path(sys.argv[1]))
"""


def make_model(folder: Path) -> Path:
    command = [ENVIRONMENTS / "trainer" / "bin" / "python", "-c", _MAKE_MODEL, folder]
    subprocess.run(command, cwd=ROOT / "examples" / "arithmetic", check=True, timeout=300)
    return folder


class LiveRun:
    """The processes of a run, and what it is configured to be.

    Args:
        folder: for data, logs, checkpoints.
        model: the policy to begin with.
        addresses: of the services by kind; free ports of this host if left out.
        settings: more keys of the run file.
        within: given a process's name and its command line, returns the command line that runs it where it belongs.
        own: keys of the run file that one process alone has, by its name, e.g. its certificate.
        environment: more variables of a process, by its name.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        addresses: Mapping[str, str] | None = None,
        settings: Mapping[str, object] | None = None,
        within: Callable[[str, list[str]], list[str]] = lambda name, command: command,
        own: Mapping[str, Mapping[str, object]] | None = None,
        environment: Mapping[str, Mapping[str, str]] | None = None,
    ):
        *ports, self._redis_port = free_ports(5)
        self.folder = folder
        self.addresses = addresses or {kind: f"127.0.0.1:{port}" for kind, port in zip(KINDS, ports, strict=True)}
        self._within, self._own, self._environment = within, own or {}, environment or {}
        more = settings or {}
        self._processes: dict[str, subprocess.Popen] = {}
        data = folder / "train.jsonl"
        rows = [{"prompt": f"{n % 5 + 1}+{n % 3 + 1}=?", "gt_answer": str(n % 5 + n % 3 + 2)} for n in range(30)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
            "trainer.evaluation.interval": 0,
            "trainer.evaluation.sets": "[]",
            "trainer.checkpoint.interval": 3,
            "broker.redis_url": f"redis://127.0.0.1:{self._redis_port}/0",
            **{f"addresses.{kind}": address for kind, address in self.addresses.items()},
            **more,
        }
        self._arguments = [str(ROOT / "examples" / "arithmetic" / "run.toml"), *_overrides(keys)]

    def _of(self, name: str) -> list[str]:
        return [*self._arguments, *_overrides(self._own.get(name, {}))]

    def start_redis(self) -> None:
        """Start Redis; the broker waits until it answers."""
        options = ["--bind", "127.0.0.1", "--port", str(self._redis_port), "--appendonly", "yes", "--save", ""]
        self._start("redis", [find_server(), *options, "--dir", str(self.folder)], {})
        deadline = time.monotonic() + STOP_SECONDS
        while "Ready to accept connections" not in self.log("redis"):
            assert time.monotonic() < deadline and self._processes["redis"].poll() is None, self.log("redis")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes["redis"].wait(0.05)  # the pause between two looks

    def start(self, kind: str, build: Build) -> None:
        """Start a service of a build; it finds the others by itself."""
        command = [str(ENVIRONMENTS / kind / "bin" / "python"), "-m", f"quartet_{kind}", *self._of(kind)]
        self._start(kind, command, build.environment())

    def attach(self, build: Build) -> None:
        """Start `quartet run --attach`: it makes the run or finds it, feeds it, and shows it."""
        command = [str(ENVIRONMENTS / "client" / "bin" / "quartet"), "run", "--attach", "--plain", *self._of("client")]
        self._start("client", command, build.environment())

    def audit(self) -> subprocess.CompletedProcess:
        """Run `quartet audit`."""
        command = [str(ENVIRONMENTS / "client" / "bin" / "quartet"), "audit", RUN, "--config", *self._of("client")]
        return subprocess.run(
            self._within("client", command), cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )

    async def until(self, what: str, true: Callable[[], Awaitable[object]]) -> None:
        """Wait until something is so while all processes run. Raises AssertionError if it does not become so."""
        deadline = time.monotonic() + SECONDS
        while not await true():
            self.must_run()
            assert time.monotonic() < deadline, f"{what}: not within {SECONDS:.0f} s\n{self.logs()}"
            await asyncio.sleep(0.1)

    async def begin(self, build: Build, client: AsyncClient) -> None:
        """Start `quartet run --attach` and wait until it has made the run."""
        self.attach(build)

        async def is_made() -> bool:
            return RUN in {run.run_id for run in await client.runs()}

        await self.until("the run is made", is_made)

    async def finish(self, client: AsyncClient) -> Run:
        """Have the feeder leave, as by a person, end the run's prompts, wait for its end, and audit it."""
        status = await asyncio.to_thread(self.stop, "client", signal.SIGINT)
        assert status == 130, f"the feeder ended with {status}: {self.log('client')[-2000:]}"
        await client.end_prompts(RUN)
        status = await asyncio.to_thread(self._processes["trainer"].wait, SECONDS)
        assert status == 0, f"the trainer ended with {status}: {self.log('trainer')[-2000:]}"
        run = await client.run(RUN)
        assert run.state == "succeeded", run
        audit = await asyncio.to_thread(self.audit)
        assert audit.returncode == 0, audit.stdout + audit.stderr
        assert f"{run.stats.committed} exactly once, 0 lost, 0 twice, 0 stuck" in audit.stdout, audit.stdout
        return run

    def must_run(self) -> None:
        """Raise AssertionError if a process has ended by itself."""
        for name, process in self._processes.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}\n{self.logs()}"

    def stop(self, name: str, number: int = signal.SIGTERM) -> int:
        """Signal a process; return the exit status it ends with."""
        process = self._processes[name]
        assert process.poll() is None, f"{name} had ended with {process.returncode}: {self.log(name)[-2000:]}"
        process.send_signal(number)
        return process.wait(STOP_SECONDS)

    def wait(self, name: str, seconds: float) -> int:
        """Wait until a process ends by itself; return its exit status."""
        return self._processes[name].wait(seconds)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """Return the end of every log, for a failed assertion."""
        return "\n".join(f"--- {name}\n{self.log(name)[-2500:]}" for name in self._processes)

    def close(self) -> None:
        """Kill what is left, with everything it started."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):  # it has ended, and all of its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        more = self._environment.get(name, {})
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **environment, **more}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._within(name, command),
                cwd=self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


class Story:
    """The run's events as they come, for whoever waits for one; those after the event `after`, "$": new ones."""

    def __init__(self, live: LiveRun, client: AsyncClient, after: str = ""):
        self._live, self._client, self._after = live, client, after
        self._news = asyncio.Condition()
        self.events: list[RunEvent] = []
        self._reading: asyncio.Task | None = None

    async def until(self, what: str, wanted: Callable[[list[RunEvent]], bool]) -> list[RunEvent]:
        """Wait until the events from now on are as wanted; return them. Raises AssertionError if they do not come."""
        begin = len(self.events)
        deadline = time.monotonic() + SECONDS
        self._reading = self._reading or asyncio.create_task(self._read())
        while not wanted(self.events[begin:]):
            self._live.must_run()
            if self._reading.done():
                self._reading.result()
                raise AssertionError(f"the run ended before: {what}")
            assert time.monotonic() < deadline, f"{what}: not within {SECONDS:.0f} s\n{self._live.logs()}"
            async with self._news:
                try:
                    async with asyncio.timeout(1):  # to look whether all processes run
                        await self._news.wait()
                except TimeoutError:
                    continue
        print(what, flush=True)
        return self.events[begin:]

    async def _read(self) -> None:
        async for event in self._client.watch(RUN, after=self._after):
            self.events.append(event)
            async with self._news:
                self._news.notify_all()

    async def close(self) -> None:
        """Listen no more."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)


def steps(count: int) -> Callable[[list[RunEvent]], bool]:
    """So many steps were trained."""
    return lambda events: sum(isinstance(event.what, StepFinished) for event in events) >= count
