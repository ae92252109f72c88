"""Interpreters of the environments whose libraries are imported, which takes 10 s of CPU each time for torch."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".quartet" / "envs"
QWEN2 = "transformers.models.qwen2.modeling_qwen2"
MODULES = {
    "broker": ("quartet_broker", "quartet_common"),
    "reward": ("quartet_reward", "quartet_common"),
    "rollout": ("quartet_rollout", "quartet_common", QWEN2),
    "trainer": ("quartet_trainer", "quartet_common", QWEN2, "torch.utils.tensorboard"),
    "client": ("quartet_client", "quartet_common"),
}
LIBRARIES = ("torch", QWEN2)
"""Of the trainer's and the rollout's environment, for a release's packages."""


def process_of(pid: int) -> int:
    """Return the process, leader of its group, for which a preloaded `python` stands; `pid` if it is ordinary."""
    word, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
    return int(number) if word == "for" and number.isdigit() else pid


class Preloaded:
    """An interpreter, `python`, whose processes begin with `modules` imported. It can be used at once, until `close`.

    The processes are as real as ever: each has its own memory, arguments, environment, ports, signals and exit status.
    """

    def __init__(self, interpreter: Path | str, *modules: str):
        self.folder = Path(tempfile.mkdtemp(prefix="preloaded-"))  # a socket's path must be short
        self.python = self.folder / "bin" / "python"
        self.python.parent.mkdir()
        self.python.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
        self.python.chmod(0o755)
        command = [interpreter, "-W", "ignore", HERE / "server.py", *modules]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(self.python.with_name("socket")))
            listening.listen(128)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            with (self.folder / "log").open("w") as log:
                self._server = subprocess.Popen(
                    command, stdin=listening, stdout=log, stderr=log, env=environment, start_new_session=True
                )

    def close(self) -> None:
        """End it, and what is left of its processes."""
        assert self._server.poll() is None, (self.folder / "log").read_text()
        self._server.kill()
        self._server.wait()
        shutil.rmtree(self.folder)


class Pythons:
    """The preloaded interpreters of environments, each started when it is first asked for; all end with `close`."""

    def __init__(self) -> None:
        self._made: dict[str, Preloaded] = {}

    def start(self, environment: str) -> None:
        """Have it import while something else is done."""
        if environment not in self._made:
            interpreter = ENVIRONMENTS / environment / "bin" / "python"
            self._made[environment] = Preloaded(interpreter, *MODULES[environment])

    def __getitem__(self, environment: str) -> Path:
        self.start(environment)
        return self._made[environment].python

    def libraries(self, environment: str) -> Path:
        """The interpreter of an environment with `LIBRARIES` alone imported."""
        if (name := f"{environment} libraries") not in self._made:
            self._made[name] = Preloaded(ENVIRONMENTS / environment / "bin" / "python", *LIBRARIES)
        return self._made[name].python

    def close(self) -> None:
        """End them all."""
        for each in self._made.values():
            each.close()
