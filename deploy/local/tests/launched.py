"""A `quartet run` or `eval` as started by a user, and all processes that it starts."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENTS = ROOT / ".quartet" / "envs"
SERVICES = ("broker", "reward", "rollout", "trainer")
sys.path.append(str(ROOT / "tests" / "preloaded"))
sys.path.append(str(ROOT / "services" / "common" / "tests"))  # fake_nvidia_smi

from preloaded import Pythons, process_of  # noqa: E402
from started import Started  # noqa: E402

PACE = ROOT / "tests" / "preloaded" / "pace.py"
ENDLESS = ("--set", "run.max_steps=1000000", "--set", f'trainer.callbacks=["{PACE}:Pace"]')
"""Options of a run that goes on, and leaves the processors to what is done beside it."""
_MARK = "QUARTET_TEST_MARK"


def hollow_model(folder: Path, parameters: int) -> Path:
    """Make a folder with a bf16 model of `parameters` parameters: a header and a sparse file."""
    tensor = {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {}, "w": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(2 * parameters)
    return folder


def preloaded_checkout(folder: Path, pythons: Pythons, by_hand: bool = False, ordinary: str = "") -> Path:
    """Make a checkout with preloaded launcher and services, except the `ordinary` one.

    Its environments are for the CPU, unless they are `by_hand`: then the launcher uses GPUs if there are any.
    """
    local = folder / "deploy" / "local"
    shutil.copytree(ROOT / "deploy" / "local" / "quartet_local", local / "quartet_local")
    (local / "environments.py").symlink_to(ROOT / "deploy" / "local" / "environments.py")
    for name in (*SERVICES, "environment", "client"):
        environment = folder / ".quartet" / "envs" / name
        environment.mkdir(parents=True)
        if name in (ordinary, "environment"):
            for part in ("bin", "lib", "pyvenv.cfg"):
                (environment / part).symlink_to(ENVIRONMENTS / name / part)
        else:
            (environment / "bin").symlink_to(pythons[name].parent)
        if not by_hand:
            (environment / "quartet-stamp.json").write_text('{"profile": "cpu"}')
    return folder


class Launched(Started):
    """A launcher process. All its descendants have a mark in their environment.

    Args:
        arguments: after the `command`'s words.
        output: the file it writes to.
        checkout: whose launcher and environments are used.
    """

    def __init__(
        self,
        arguments: list[str],
        output: Path,
        checkout: Path,
        command: tuple[str, ...] = ("run", "--plain"),
        environment: Mapping[str, str] = MappingProxyType({}),
    ):
        self.mark = uuid.uuid4().hex
        quartet = [checkout / ".quartet" / "envs" / "client" / "bin" / "python", "-m", "quartet_client"]
        path = {"PYTHONPATH": str(checkout / "deploy" / "local")}
        variables = {**os.environ, **path, **environment, _MARK: self.mark}
        super().__init__([*quartet, *command, *arguments], output, cwd=ROOT, env=variables)

    def wait_for_line(self, start: str, seconds: float, times: int = 1) -> None:
        """Wait until `times` lines of its output start with `start`."""
        self.wait_until(
            lambda: sum(line.startswith(start) for line in self.said().splitlines()) >= times, f"'{start}'", seconds
        )

    def processes(self) -> dict[int, str]:
        """Return pid and command line of all running processes of this run except the launcher."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            try:
                marked = f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                # Redis overwrites its environment with its title; its working directory is in the test's folder.
                if marked or (entry / "cwd").resolve().is_relative_to(self.log.parent):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has exited, or is another user's
        return found

    def visible_gpus(self) -> dict[str, str]:
        """Return CUDA_VISIBLE_DEVICES of each service that has it, by its log's name."""
        found = {}
        for pid, command in self.processes().items():
            guard = Path("/proc") / str(pid)
            variables = dict(each.partition("=")[::2] for each in (guard / "environ").read_text().split("\0"))
            if "guard.py" in command and "CUDA_VISIBLE_DEVICES" in variables:
                found[(guard / "fd" / "1").readlink().stem] = variables["CUDA_VISIBLE_DEVICES"]
        return found

    def service(self, name: str) -> int:
        """Return the process id of a service itself, not of its guard or its preloaded proxy."""
        wanted = "redis-server" if name == "redis" else f"-m quartet_{name} "
        processes = self.processes()
        pids = [pid for pid, command in processes.items() if wanted in command and "guard.py" not in command]
        assert len(pids) == 1, f"{name}: {processes}"
        return process_of(pids[0])

    def assert_gone(self, within: float) -> None:
        """Fail if a process still runs after `within` seconds."""
        deadline = time.monotonic() + within
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind after {within} s: {left}\n{self.said()}"
            time.sleep(0.1)

    def close(self) -> None:
        """Kill it and all processes that it started."""
        super().close()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
