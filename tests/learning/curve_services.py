"""The four services that the learning curves are made with: what can stand stands, what has a run's state is new.

Redis, broker and reward service serve all runs, as in production. Each run has a rollout and a trainer of its own;
their imports are shared (`preloaded.py`).
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from quartet_local.redis import find_server

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".quartet" / "envs"
sys.path.append(str(ROOT / "benchmarks"))

from measuring import Side, free_port, process, service  # noqa: E402

STOP_SECONDS = 40.0
QWEN2 = "transformers.models.qwen2.modeling_qwen2"
PRELOADED = {
    "rollout": ("quartet_rollout.service", "quartet_rollout.engines.transformers_engine.core", QWEN2),
    "trainer": ("quartet_trainer.life", "quartet_trainer.learner.booster_learner", QWEN2),
}


class Services:
    """Redis, broker and reward service, and the preloaded rollout and trainer; all end with the stack."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        redis = [find_server(), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
        stack.enter_context(process(redis, folder / "redis.log"))
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        url = f"broker.redis_url={self.redis_url}"
        self._addresses = {
            "broker": stack.enter_context(service("broker", folder, [url])),
            "reward": stack.enter_context(service("reward", folder, [])),
        }
        self._preloaded = {}
        for kind, modules in PRELOADED.items():
            python = str(ENVIRONMENTS / kind / "bin" / "python")
            command = [python, "-W", "ignore", str(Path(__file__).with_name("preloaded.py")), f"quartet_{kind}"]
            self._preloaded[kind] = Side([*command, *modules], folder / f"{kind}.log", stack)

    def address(self, kind: str) -> str:
        """Return where the broker or the reward service listens."""
        return self._addresses[kind]

    def addresses(self) -> list[str]:
        """Return the settings that say where the four are; rollout's and trainer's ports are free ones."""
        ports = {kind: f"127.0.0.1:{free_port()}" for kind in self._preloaded}
        return [f"addresses.{kind}={address}" for kind, address in {**self._addresses, **ports}.items()]

    @contextlib.contextmanager
    def run(self, arguments: list[str], logs: Path) -> Iterator["Pair"]:
        """Have a rollout and a trainer of one's own; both have ended afterwards, by themselves, as told or killed."""
        for kind, side in self._preloaded.items():
            side.tell({"arguments": arguments, "log": str(logs / f"{kind}.log")})
        pair = Pair(self._preloaded)
        try:
            yield pair
        finally:
            pair.end()


class Pair:
    """A rollout and a trainer, running or ended."""

    def __init__(self, sides: dict[str, Side]):
        self.changed = threading.Event()
        """Set when one of them has ended."""
        self.statuses: dict[str, int] = {}
        """Exit statuses of those that have ended, by kind."""
        self._pids = {kind: side.hear()["pid"] for kind, side in sides.items()}
        self._threads = [threading.Thread(target=self._listen, args=pair, daemon=True) for pair in sides.items()]
        for thread in self._threads:
            thread.start()

    def _listen(self, kind: str, side: Side) -> None:
        self.statuses[kind] = side.hear()["status"]
        self.changed.set()

    def end(self) -> None:
        """Ask both to end; kill what has not after a while."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for kind, pid in self._pids.items():
                if kind not in self.statuses:
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(pid, number)
            deadline = time.monotonic() + STOP_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
