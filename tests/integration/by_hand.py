"""The services as started in terminals of their own: separate processes, each from its own environment."""

import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from quartet_common.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".quartet" / "envs"
PACED = f'["{ROOT}/tests/preloaded/pace.py:Pace"]'
"""`trainer.callbacks` of a run that goes on beside what a test does."""
sys.path.append(str(ROOT / "tests" / "preloaded"))
from started import REDIS_ANSWERS, Started, redis_command  # noqa: E402 (beside the other suites' tests)

SERVICES = ("broker", "reward", "rollout", "trainer")
"""Those of every run; the environment service is started by the tests that need it."""


class ByHand:
    """Processes started individually; `close` stops the remaining ones.

        Args:
            pythons: the environments' interpreters.
            overrides: of the run file.
    addresses: of the services; default: free ports of this host.
    """

    def __init__(
        self,
        folder: Path,
        run_file: Path,
        pythons: Mapping[str, Path],
        overrides: Mapping[str, object],
        addresses: Mapping[str, str] | None = None,
    ):
        self.pythons = pythons
        named = (*SERVICES, "environment")
        *ports, redis = free_ports(len(named) + 1, neighbor=100)  # for metrics
        self.folder = folder
        self.redis_port, self.redis_data = redis, folder / "redis"
        self.addresses = addresses or {name: f"127.0.0.1:{port}" for name, port in zip(named, ports, strict=True)}
        settings = {f"addresses.{name}": address for name, address in self.addresses.items()}
        settings |= {"broker.redis_url": f"redis://127.0.0.1:{redis}/0", **overrides}
        self.arguments = [str(run_file), *overriding(settings)]
        self.processes: dict[str, Started] = {}

    def start_redis(self) -> None:
        """Start Redis and return when it listens."""
        self.redis_data.mkdir(exist_ok=True)
        self._start("redis", redis_command(self.redis_port, self.redis_data, kept=True))
        self.wait_for("redis", REDIS_ANSWERS)

    def start(self, name: str, *options: str) -> None:
        """Start a service with command-line options."""
        self._start(name, [self.pythons[name], "-m", f"quartet_{name}", *self.arguments, *options])

    def client(self, *words: str) -> Started:
        """Start a `quartet` command; its output goes to client.log."""
        self._start("client", [self.pythons["client"], "-m", "quartet_client", *words])
        return self.processes["client"]

    def run_all(self, seconds: float = 200) -> None:
        """Start everything, and return when the run has succeeded."""
        self.start_redis()
        for name in SERVICES:
            self.start(name)
        assert self.client("run", "--attach", "--plain", *self.arguments).wait(seconds) == 0, self.logs()

    def rows(self, kind: str) -> list[dict]:
        """Return the rows of this kind in metrics.jsonl."""
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def _start(self, name: str, command: list[str | Path], **options) -> None:
        """`options` are Popen's."""
        self.processes[name] = Started(command, self.folder / f"{name}.log", **{"cwd": ROOT, **options})

    def log(self, name: str) -> str:
        """Return the output of a process, including earlier ones of the same name."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_until(self, name: str, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition while a process runs."""
        try:
            self.processes[name].wait_until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    def wait_for(self, name: str, text: str) -> None:
        """Wait until a process has printed `text`."""
        self.wait_until(name, lambda: text in self.processes[name].said(), f"it says '{text}'")

    def logs(self) -> str:
        """Return the end of every log, for assertion messages."""
        return "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in self.processes)

    def stop(self, name: str, number: int = signal.SIGTERM, timeout: float = 120) -> int:
        """Send a running process a signal and return its exit status."""
        process = self.processes[name]
        process.must_run()
        process.send_signal(number)
        return process.wait(timeout)

    def close(self) -> None:
        """Kill all processes and their descendants."""
        for process in self.processes.values():
            process.close()


def overriding(settings: Mapping[str, object]) -> list[str]:
    """Return the command-line arguments that override keys of the run file."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def write_sums(path: Path) -> None:
    """Write thirty sums with their answers in the format of [data]."""
    rows = [{"prompt": f"{n % 5 + 1}+{n % 3 + 1}=?", "gt_answer": str(n % 5 + n % 3 + 2)} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
