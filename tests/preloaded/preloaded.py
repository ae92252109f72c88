"""Interpreters of the environments whose libraries are imported, which takes 10 s of CPU each time for torch."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".quartet" / "envs"
QWEN2 = "transformers.models.qwen2.modeling_qwen2"
MODULES = {
    "broker": ("quartet_broker", "quartet_common"),
    "reward": ("quartet_reward", "quartet_common"),
    "rollout libraries": ("torch", QWEN2),
    "rollout": ("quartet_rollout", "quartet_common"),
    "vllm": ("vllm.v1.engine.async_llm", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker"),
    "trainer libraries": ("torch", QWEN2),
    "trainer": ("quartet_trainer", "quartet_common", "torch.utils.tensorboard"),
    "client": ("quartet_client", "quartet_common"),
    "dev": ("quartet_client", "quartet_common"),
}
"""By environment; "vllm": the rollout's, for the engine and for the processes that it starts itself; "… libraries": of
it what is not Quartet's, for another build's packages."""
BENEATH = {"rollout": "rollout libraries", "vllm": "rollout", "trainer": "trainer libraries"}
"""Which of them another is forked from, as it imports more than that."""
VLLM = {"VLLM_CONFIGURE_LOGGING": "0", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
"""What the rollout sets before it imports vLLM; torch reads some of it when it is imported."""
SHARED = "QUARTET_PRELOADED"
"""The variable that names the socket of the `Shared` of a run of several suites."""
CLOSE = "close"
_MAKE_MODELS = """
import sys; from pathlib import Path
from model import build_model, build_tokenizer, save
for seed, folder in enumerate(sys.argv[1:]): save(build_model(seed), build_tokenizer(), Path(folder))
"""


def make_models(python: Path, *folders: Path) -> None:
    """Write the demo's model, untrained, into each folder, each with other random weights; by the trainer's Python."""
    where = ROOT / "examples" / "arithmetic"
    subprocess.run([python, "-c", _MAKE_MODELS, *folders], cwd=where, check=True, timeout=300)


def install_extensions(folder: Path) -> Path:
    """Install examples/extensions below a folder, as docs/extend.md shows it, from a copy: building leaves files."""
    subprocess.run(["cp", "-r", ROOT / "examples" / "extensions", folder / "source"], check=True, timeout=60)
    uv, python = ROOT / ".quartet" / "tools" / "bin" / "uv", ENVIRONMENTS / "dev" / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation", "--python", python]
    subprocess.run([*install, "--target", folder / "site", folder / "source"], check=True, timeout=100)
    return folder / "site"


def process_of(pid: int) -> int:
    """Return the process, leader of its group, for which a preloaded `python` stands; `pid` if it is ordinary."""
    word, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
    return int(number) if word == "for" and number.isdigit() else pid


class Preloaded:
    """An interpreter, `python`, whose processes begin with `modules` imported. It can be used at once, until `close`.

    `variables` are the environment's during the imports.

    The processes are as real as ever: each has its own memory, arguments, environment, ports, signals and exit status.
    """

    def __init__(self, interpreter: Path, *modules: str, **variables: str):
        self.folder = Path(tempfile.mkdtemp(prefix="preloaded-"))  # a socket's path must be short
        self.python = self.folder / "bin" / "python"
        self.python.parent.mkdir()
        self.python.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
        self.python.chmod(0o755)
        command = [interpreter, "-Wignore", HERE / "server.py", *modules]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(self.python.with_name("socket")))
            listening.listen(128)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
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
    """The preloaded interpreters of environments, each started when it is first asked for; all end with `close`.

    Beneath a `Shared` they are its, and go on.
    """

    def __init__(self) -> None:
        self._own: dict[str, Preloaded] = {}
        self._shared = os.environ.get(SHARED)

    def start(self, name: str) -> Path:
        """Have one of `MODULES` import while something else is done."""
        if self._shared:
            return _ask(self._shared, name)
        if name not in self._own:
            ordinary = ENVIRONMENTS / name.partition(" ")[0] / "bin" / "python"
            interpreter = self.start(BENEATH[name]) if name in BENEATH else ordinary
            variables = VLLM if name in ("vllm", "rollout libraries") else {}
            self._own[name] = Preloaded(interpreter, *MODULES[name], **variables)
        return self._own[name].python

    def __getitem__(self, environment: str) -> Path:
        return self.start(environment)

    def libraries(self, environment: str) -> Path:
        """The interpreter of an environment with none of Quartet's packages imported."""
        name = f"{environment} libraries"
        return self.start(name) if name in MODULES else ENVIRONMENTS / environment / "bin" / "python"

    def close(self) -> None:
        """End those that are its own, each before what it was forked from."""
        for each in reversed(self._own.values()):
            each.close()


class Shared:
    """Preloaded interpreters of all suites of a run, by the thread that a process beneath may ask for them."""

    def __init__(self) -> None:
        self._pythons = Pythons()
        self._folder = Path(tempfile.mkdtemp(prefix="preloaded-"))
        os.environ[SHARED] = str(self._folder / "socket")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(os.environ[SHARED])
        self._listening.listen(16)
        # The interpreters end with the thread that started them.
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection:
                if (name := connection.recv(100).decode()) == CLOSE:
                    return self._pythons.close()
                if name:
                    connection.send(str(self._pythons.start(name)).encode())

    def close(self) -> None:
        """End them all. Raises AssertionError if one has ended before."""
        _ask(os.environ.pop(SHARED), CLOSE)
        self._thread.join()
        self._listening.close()
        shutil.rmtree(self._folder)


def _ask(address: str, name: str) -> Path:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        connection.send(name.encode())
        return Path(connection.recv(1000).decode())
