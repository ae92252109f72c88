"""Interpreters with libraries already imported: importing torch takes 10 s of CPU for each process otherwise."""

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
    "environment": ("quartet_environment", "quartet_common"),
    "rollout libraries": ("torch", QWEN2),
    "rollout": ("quartet_rollout", "quartet_common"),
    "vllm": ("vllm.v1.engine.async_llm", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker"),
    "trainer libraries": ("torch", QWEN2),
    "trainer": ("quartet_trainer", "quartet_common", "torch.utils.tensorboard"),
    "client": ("quartet_client", "quartet_common"),
    "dev": ("quartet_client", "quartet_common"),
}
"""Imported modules by environment. "vllm" is the rollout's environment for the engine and the processes it starts; "…
libraries" have no packages of Quartet, for tests of another build."""
BENEATH = {"rollout": "rollout libraries", "vllm": "rollout", "trainer": "trainer libraries"}
"""The interpreter that each is forked from."""
VLLM = {"VLLM_CONFIGURE_LOGGING": "0", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
"""Variables that the rollout sets before it imports vLLM; torch reads some of them when it is imported."""
SYMPY = {"SYMPY_GROUND_TYPES": "python"}
"""What the reward service sets for its workers that compare mathematics; sympy reads it when it is imported."""
SHARED = "QUARTET_PRELOADED"
"""The variable with the socket of a test run's `Shared`."""
CLOSE = "close"
_MAKE_MODELS = """
import sys; from pathlib import Path
from model import build_model, build_tokenizer, save
for seed, folder in enumerate(sys.argv[1:]): save(build_model(seed), build_tokenizer(), Path(folder))
"""


def make_models(python: Path, *folders: Path) -> None:
    """Write the demo's model, with a different random seed for each folder. `python` is the trainer's."""
    where = ROOT / "examples" / "arithmetic"
    subprocess.run([python, "-c", _MAKE_MODELS, *folders], cwd=where, check=True, timeout=300)


def install_extensions(folder: Path) -> Path:
    """Install examples/extensions below a folder, as in docs/extend.md, from a copy, because building leaves files."""
    subprocess.run(["cp", "-r", ROOT / "examples" / "extensions", folder / "source"], check=True, timeout=60)
    uv, python = ROOT / ".quartet" / "tools" / "bin" / "uv", ENVIRONMENTS / "dev" / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation", "--python", python]
    subprocess.run([*install, "--target", folder / "site", folder / "source"], check=True, timeout=100)
    return folder / "site"


def process_of(pid: int) -> int:
    """Return the forked process of a preloaded `python`, which leads its group; `pid` itself for another process."""
    word, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
    return int(number) if word == "for" and number.isdigit() else pid


class Preloaded:
    """An interpreter, `python`, whose processes start with `modules` imported; usable immediately, until `close`.

    Each process has its own memory, arguments, environment, ports, signals and exit status. `variables` are in the
    environment during the imports.
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
        """Kill it and its processes."""
        assert self._server.poll() is None, (self.folder / "log").read_text()
        self._server.kill()
        self._server.wait()
        shutil.rmtree(self.folder)


class Pythons:
    """Preloaded interpreters by environment, each started at its first use, until `close`.

    In a test run with a `Shared` they are its interpreters, and `close` does not end them.
    """

    def __init__(self) -> None:
        self._own: dict[str, Preloaded] = {}
        self._shared = os.environ.get(SHARED)

    def start(self, name: str) -> Path:
        """Start the imports of one of `MODULES`; return its interpreter without waiting for them."""
        if self._shared:
            return _ask(self._shared, name)
        if name not in self._own:
            ordinary = ENVIRONMENTS / name.partition(" ")[0] / "bin" / "python"
            interpreter = self.start(BENEATH[name]) if name in BENEATH else ordinary
            variables = {"vllm": VLLM, "rollout libraries": VLLM, "reward": SYMPY}.get(name, {})
            self._own[name] = Preloaded(interpreter, *MODULES[name], **variables)
        return self._own[name].python

    def __getitem__(self, environment: str) -> Path:
        return self.start(environment)

    def libraries(self, environment: str) -> Path:
        """Return the interpreter of an environment without Quartet's packages imported."""
        name = f"{environment} libraries"
        return self.start(name) if name in MODULES else ENVIRONMENTS / environment / "bin" / "python"

    def close(self) -> None:
        """End its own interpreters, each before the one it was forked from."""
        for each in reversed(self._own.values()):
            each.close()


class Shared:
    """Preloaded interpreters for all suites of a test run; descendants request them through a socket."""

    def __init__(self) -> None:
        self._pythons = Pythons()
        self._folder = Path(tempfile.mkdtemp(prefix="preloaded-"))
        os.environ[SHARED] = str(self._folder / "socket")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(os.environ[SHARED])
        self._listening.listen(16)
        # The interpreters end with the thread that started them, so one thread starts all.
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
        """End all of them. Raises AssertionError if one has exited by itself."""
        _ask(os.environ.pop(SHARED), CLOSE)
        self._thread.join()
        self._listening.close()
        shutil.rmtree(self._folder)


def _ask(address: str, name: str) -> Path:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        connection.send(name.encode())
        return Path(connection.recv(1000).decode())
