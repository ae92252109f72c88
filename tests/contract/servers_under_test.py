"""The servers under test: real processes with run files of their own, a real Redis, two tiny random models.

Whoever has an implementation of his own has it tested by naming the command that starts it, e.g.
`QUARTET_CONTRACT_BROKER="/opt/my-broker --fast"`; it gets the path of the run file as its last argument.
"""

import atexit
import functools
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet_common.ports import free_ports
from quartet_contract.calls import OPTIONS, Caller

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "preloaded"))

from preloaded import Pythons, make_models  # noqa: E402
from started import REDIS_ANSWERS, Started, redis_command, write_run_file  # noqa: E402

PYTHONS = Pythons()
atexit.register(PYTHONS.close)
ENVIRONMENTS = ROOT / ".quartet" / "envs"
RELEASED = ("broker", "reward", "rollout", "trainer")
"""The services of every release."""
KINDS = (*RELEASED, "environment")


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


class Server(Started):
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
        if environment:  # a release refuses addresses of services that it does not know
            known = {one: address for one, address in sections["addresses"].items() if one in RELEASED}
            sections = {**sections, "addresses": known}
        run_file = write_run_file(folder / f"{name or kind}.toml", sections)
        python = python_of(kind, release=bool(environment))
        if sections[kind].get("engine") == "vllm":
            python = PYTHONS["vllm"]
        command, log = [*command_of(kind, python), str(run_file)], folder / f"{name or kind}.log"
        super().__init__(command, log, cwd=folder, env=_environment(environment))
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


def free_addresses() -> dict[str, str]:
    """Addresses by kind, where nothing listens."""
    return {kind: f"127.0.0.1:{port}" for kind, port in zip(KINDS, free_ports(len(KINDS)), strict=True)}


class Servers:
    """Servers that know one another's addresses; killed together.

    Args:
        environment: more variables of theirs, a release's.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None):
        self.folder, self.environment = folder, environment
        self.addresses = free_addresses()
        self.processes: list[Started] = []

    def start_redis(self) -> tuple[Started, str]:
        """Return it, once it answers, and its URL."""
        (port,) = free_ports(1)
        redis = Started(redis_command(port, self.folder), self.folder / "redis.log")
        self.processes.append(redis)
        redis.wait_until(lambda: REDIS_ANSWERS in redis.said(), "it answers")
        return redis, f"redis://127.0.0.1:{port}/0"

    def serve(
        self, kind: str, name: str = "", token: str = "", sections: Mapping[str, Mapping] | None = None, **own: object
    ) -> Server:
        """Start a service, which is not waited for: `own` are the keys of its section, `sections` the others."""
        made = {"addresses": self.addresses, "server": {"metrics": False}, **(sections or {}), kind: own}
        server = Server(kind, self.folder, made, name, token, self.environment)
        self.processes.append(server)
        return server

    def close(self) -> None:
        """Kill everything."""
        for process in reversed(self.processes):
            process.close()
