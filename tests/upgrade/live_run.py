"""Redis and the four services of a run that goes on, each a process that can be replaced by one of another build."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from another_build import ROOT, Build

from quartet_common.ports import free_ports
from quartet_local.redis import find_server

ENVIRONMENTS = ROOT / ".quartet" / "envs"
KINDS = ("broker", "reward", "rollout", "trainer")
RUN = "upgraded"
STOP_SECONDS = 60.0


def _overrides(keys: Mapping[str, object]) -> list[str]:
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


_MAKE_MODEL = """
import sys; from pathlib import Path
from model import build_model, build_tokenizer, save
save(build_model(0), build_tokenizer(), Path(sys.argv[1]))
"""


def make_model(folder: Path) -> Path:
    """Write the demo's model, untrained, into a folder."""
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
        """Return the process id of what runs under a name."""
        return self._processes[name].pid

    def log(self, name: str) -> str:
        """Return what all processes of a name have said."""
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
