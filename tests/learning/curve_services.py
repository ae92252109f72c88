"""The four services that the learning curves are made with: what can stand stands, what has a run's state is new.

Redis, broker and reward service serve all runs, as in production. Each run has a rollout and a trainer of its own;
their imports are shared (`preloaded.py`).
"""

import contextlib
import os
import signal
import socket
import sys
import threading
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
        url = f"broker.redis_url=redis://127.0.0.1:{port}/0"
        self._addresses = {
            "broker": stack.enter_context(service("broker", folder, [url])),
            "reward": stack.enter_context(service("reward", folder, [])),
        }
        self._preloaded = {}
        for kind, modules in PRELOADED.items():
            python = str(ENVIRONMENTS / kind / "bin" / "python")
            command = [python, "-W", "ignore", str(Path(__file__).with_name("preloaded.py")), f"quartet_{kind}"]
            self._preloaded[kind] = Side([*command, *modules], folder / f"{kind}.log", stack)

    def addresses(self) -> list[str]:
        """Return the settings that say where the four are; rollout's and trainer's ports are free ones."""
        with contextlib.ExitStack() as stack:
            probes = {kind: stack.enter_context(socket.socket()) for kind in self._preloaded}
            for probe in probes.values():
                probe.bind(("127.0.0.1", 0))
            ports = {kind: f"127.0.0.1:{probe.getsockname()[1]}" for kind, probe in probes.items()}
        return [f"addresses.{kind}={address}" for kind, address in {**self._addresses, **ports}.items()]

    @contextlib.contextmanager
    def run(self, arguments: list[str], logs: Path) -> Iterator[dict[str, int]]:
        """Have a rollout and a trainer. What is yielded holds their exit statuses afterwards.

        The trainer is expected to end by itself; both are asked to end, and killed if they have not after a while.
        """
        pids, statuses = {}, {}
        for kind, side in self._preloaded.items():
            side.tell({"arguments": arguments, "log": str(logs / f"{kind}.log")})
        try:
            for kind, side in self._preloaded.items():
                pids[kind] = side.hear()["pid"]
            yield statuses
        finally:
            kills = [threading.Timer(STOP_SECONDS, _send, (pid, signal.SIGKILL)) for pid in pids.values()]
            for pid, kill in zip(pids.values(), kills, strict=True):
                _send(pid, signal.SIGTERM)
                kill.start()
            for (kind, _), kill in zip(pids.items(), kills, strict=True):
                statuses[kind] = self._preloaded[kind].hear()["status"]
                kill.cancel()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, as it should
        os.kill(pid, number)
