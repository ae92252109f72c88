"""The four services for many runs: what can stand stands, what has a run's state is new.

Redis, broker and reward service serve all runs, as in production. Each run has a rollout and a trainer of its own;
their imports are shared (`tests/preloaded`).
"""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from quartet_local.process import find_server

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".quartet" / "envs"
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "preloaded")]

from measuring import free_port, process, service  # noqa: E402
from preloaded import Pythons  # noqa: E402

STOP_SECONDS = 40.0
KINDS = ("rollout", "trainer")


class Services:
    """Redis, broker and reward service, and the preloaded rollout and trainer; all end with the stack."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, pythons: Pythons):
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        redis = [find_server(), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
        self.pythons = pythons
        for kind in KINDS:
            self.pythons.start(kind)
        stack.enter_context(process(redis, folder / "redis.log"))
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        url = f"broker.redis_url={self.redis_url}"
        self._addresses = {
            "broker": stack.enter_context(service("broker", folder, [url])),
            "reward": stack.enter_context(service("reward", folder, [])),
        }

    def address(self, kind: str) -> str:
        """Return where the broker or the reward service listens."""
        return self._addresses[kind]

    def addresses(self) -> list[str]:
        """Return the settings that say where the four are; rollout's and trainer's ports are free ones."""
        ports = {kind: f"127.0.0.1:{free_port()}" for kind in KINDS}
        return [f"addresses.{kind}={address}" for kind, address in {**self._addresses, **ports}.items()]

    @contextlib.contextmanager
    def run(self, arguments: list[str], logs: Path) -> Iterator["Pair"]:
        """Have a rollout and a trainer of one's own; both have ended afterwards, by themselves, as told or killed."""
        pair = Pair({kind: self._start(kind, arguments, logs / f"{kind}.log") for kind in KINDS})
        try:
            yield pair
        finally:
            pair.end()

    def _start(self, kind: str, arguments: list[str], log: Path) -> subprocess.Popen:
        command = [self.pythons[kind], "-m", f"quartet_{kind}", *arguments]
        with log.open("ab") as output:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


class Pair:
    """A rollout and a trainer, running or ended."""

    def __init__(self, processes: dict[str, subprocess.Popen]):
        self.changed = threading.Event()
        """Set when one of them has ended."""
        self.statuses: dict[str, int] = {}
        """Exit statuses of those that have ended, by kind."""
        self._processes = processes
        self._threads = [threading.Thread(target=self._wait, args=pair, daemon=True) for pair in processes.items()]
        for thread in self._threads:
            thread.start()

    def _wait(self, kind: str, process: subprocess.Popen) -> None:
        self.statuses[kind] = process.wait()
        self.changed.set()

    def end(self) -> None:
        """Ask both to end; kill what has not after a while."""
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for each in self._processes.values():
                end(each)
            deadline = time.monotonic() + STOP_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
