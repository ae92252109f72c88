"""The servers under test: real processes with run files of their own, a real Redis, two tiny random models.

Whoever has an implementation of his own has it tested by naming the command that starts it, e.g.
`QUARTET_CONTRACT_BROKER="/opt/my-broker --fast"`; it gets the path of the run file as its last argument.
"""

import atexit
import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet_common.ports import free_ports
from quartet_contract.calls import OPTIONS, Caller
from quartet_local.process import find_server

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "preloaded"))

from preloaded import Pythons, make_models, process_of  # noqa: E402

PYTHONS = Pythons()
atexit.register(PYTHONS.close)
ENVIRONMENTS = ROOT / ".quartet" / "envs"
KINDS = ("broker", "reward", "rollout", "trainer")
START_SECONDS = 300.0


def python_of(kind: str, release: bool = False) -> Path:
    """Return an environment's interpreter, torch and transformers imported; `release`: none of today's packages."""
    if kind not in ("rollout", "trainer"):
        return ENVIRONMENTS / kind / "bin" / "python"
    return PYTHONS.libraries(kind) if release else PYTHONS[kind]


def command_of(kind: str, python: Path) -> list[str]:
    """Return what starts a service, but for its run file."""
    named = os.environ.get(f"QUARTET_CONTRACT_{kind.upper()}")
    return shlex.split(named) if named else [str(python), "-m", f"quartet_{kind}"]


def copy_models(*folders: Path) -> None:
    """Write a model into each folder, at most two, each with other random weights."""
    for made, folder in zip(_models(), folders, strict=False):
        shutil.copytree(made, folder)


@functools.cache
def _models() -> list[Path]:
    home = Path(tempfile.mkdtemp(prefix="quartet-models-"))
    atexit.register(shutil.rmtree, home)
    folders = [home / "0", home / "1"]
    make_models(python_of("trainer"), *folders)
    for folder in folders:  # in the form that a release reads too whose trainer came with transformers 4
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "torch_dtype": config.pop("dtype")}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folders


def _environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, **(more or {})}


def write_run_file(path: Path, sections: Mapping[str, Mapping[str, object]]) -> Path:
    """Write TOML: text, numbers and truth values look the same in JSON."""
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


class Process:
    """A command that runs, its output in a log."""

    def __init__(self, command: list[str], folder: Path, name: str, environment: Mapping[str, str] | None = None):
        """`environment`: variables besides those of this process."""
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command,
                cwd=folder,
                env=_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def must_run(self) -> None:
        """Raise AssertionError with its last words if it has ended."""
        assert self.popen.poll() is None, f"{self.log.stem} ended with {self.popen.returncode}: {self.last_words()}"

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        """Look again and again until a condition holds. Raises AssertionError if that takes too long, or it ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{self.log.stem}: {what} within {seconds:.0f} s? {self.last_words()}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.1)  # the pause between two looks; its end would end it
            self.must_run()

    def last_words(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """Kill it with all it started."""
        # It may have ended by itself, and so all of its group.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(10)

    def signal(self, number: int) -> None:
        """Send it a signal, and all it started."""
        os.killpg(process_of(self.popen.pid), number)


class Redis(Process):
    """A Redis server."""

    def __init__(self, folder: Path):
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder), "--save", ""]
        super().__init__([find_server(), *options], folder, "redis")
        self.wait_until(lambda: "Ready to accept connections" in self.log.read_text(), "redis answers")


class Server(Process):
    """One service, started."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        sections: Mapping[str, Mapping[str, object]],
        name: str = "",
        token: str = "",
        environment: Mapping[str, str] | None = None,
    ):
        """`sections` is the run file; `token` what it demands of callers; `environment` a release's variables."""
        self.kind, self.address = kind, str(sections["addresses"][kind])
        self.token = token
        run_file = write_run_file(folder / f"{name or kind}.toml", sections)
        python = python_of(kind, release=bool(environment))
        if sections[kind].get("engine") == "vllm":
            python = ENVIRONMENTS / kind / "bin" / "python"
        super().__init__([*command_of(kind, python), str(run_file)], folder, name or kind, environment)
        self._caller: Caller | None = None

    def caller(self) -> Caller:
        """Return a channel to it, once it serves."""
        if self._caller is None:
            self.wait_until(self._serves, "it serves")
            self._caller = Caller(self.address, self.token)
        self.must_run()
        return self._caller

    def health(self, service: str = "", timeout: float = 10) -> int:
        """Return its answer to a probe without a token. Raises RpcError."""
        with grpc.insecure_channel(self.address, options=OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout, wait_for_ready=True
            ).status

    def _serves(self) -> bool:
        try:
            return self.health(timeout=2) == health_pb2.HealthCheckResponse.SERVING
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Kill it and close the channel."""
        if self._caller is not None:
            self._caller.close()
        super().close()
