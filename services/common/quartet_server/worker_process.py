"""Worker processes of a service: each with a socket to it, in a session of its own, killed with all that it started."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quartet_common.config import ConfigError
from quartet_common.log import get_logger
from quartet_server import worker_protocol

_END_SECONDS = 10.0
# The environment variables that workers inherit: where Python's modules are, and nothing secret.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "VIRTUAL_ENV")

log = get_logger(__name__)


class WorkerDied(Exception):
    """The worker ended by itself or was starved of CPU.

    `crashed`: it exited, or a signal other than SIGKILL and SIGTERM ended it; otherwise its task is not to blame.
    """

    def __init__(self, reason: str, crashed: bool = False):
        super().__init__(reason)
        self.crashed = crashed


@dataclass(frozen=True)
class WorkerCommand:
    """What a worker process runs."""

    module: str
    """Run by `python -m`, with `arguments` and `--parent`, the service's process id."""
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside those that every worker inherits."""
    start_seconds: float = 60.0
    """Longest time until it is ready."""
    may_wait: bool = False
    """Tasks may use little CPU, e.g. because they call a server: a worker at its deadline never counts as starved."""


def describe_function(
    module: str, path: str, field: str, seconds: float, limit: str, given: str | None = None
) -> dict[str, Any]:
    """Have a worker's module load a user's function in a process of its own; return what it tells of it.

    Args:
        module: run with `--function` and `--describe`; it prints a JSON object, with "error" if it refuses.
        path: of the function.
        field: what names the function, for errors.
        seconds: longest time to load it.
        limit: these seconds, in words.
        given: the process's standard input.

    Raises:
        ConfigError: it cannot be loaded in time, ends its process, or is refused.
    """
    command = [sys.executable, "-m", module, f"--function={path}", "--describe"]
    try:
        process = subprocess.run(
            command, input=given, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
        told = json.loads(process.stdout)
    except subprocess.TimeoutExpired:
        told = {"error": f"'{path}' was not loaded within {limit}"}
    except ValueError:
        error = process.stderr[-500:].strip()
        told = {"error": f"'{path}' ended its process with status {process.returncode}: {error}"}
    if "error" in told:
        raise ConfigError(f"{field}: {told['error']}")
    return told


class WorkerProcess:
    """A worker process and the socket to it."""

    def __init__(self, command: WorkerCommand, output: int | None = None):
        """Start the process; `await_ready` waits until it serves. Raises OSError.

        `output`: descriptor of the file that gets what it prints; None: the service's standard error.
        """
        self._socket, theirs = socket.socketpair()
        self.command = command
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            # Not asyncio.create_subprocess_exec: in Python 3.11 it hangs when it is cancelled.
            self._process = subprocess.Popen(
                [sys.executable, "-m", command.module, *command.arguments, f"--parent={os.getpid()}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=output,
                env={**environment, **command.variables},
                # The kernel divides CPU time among sessions first (man 7 sched, autogroup): a busy worker in the
                # service's own session slowed the service's answers to other callers.
                start_new_session=True,
            )
        self._writer: asyncio.StreamWriter | None = None
        self._sending = asyncio.Lock()
        self.pid = self._process.pid

    async def await_ready(self) -> None:
        """Wait until the process serves. Raises WorkerDied."""
        limit = worker_protocol.LONGEST_LINE
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=limit)
        try:
            async with asyncio.timeout(self.command.start_seconds):
                await self.receive()
        except TimeoutError:
            raise WorkerDied(f"it was not ready within {self.command.start_seconds:g} s") from None

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises WorkerDied; the process must then be replaced."""
        assert self._writer is not None, "await_ready() comes first"
        try:
            async with self._sending:
                self._writer.write(worker_protocol.pack(message))
                await self._writer.drain()
        except ConnectionError as error:
            raise await self._death() from error

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises WorkerDied; the process must then be replaced."""
        try:
            line = await self._reader.readline()
            if line.endswith(b"\n"):
                return worker_protocol.unpack(line)
        except ConnectionError as error:
            raise await self._death() from error
        except ValueError as error:
            raise WorkerDied(f"it sent an invalid message: {error}") from error
        raise await self._death()

    def kill(self) -> None:
        """Kill the process and what it started; does nothing if it has ended."""
        if self._process.returncode is None:  # until it is waited for, no other group can have its number
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the process, wait for its end and close the socket. One that does not end is left behind."""
        self.kill()
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:  # e.g. a call into a GPU's driver that does not return
            log.error("worker %d does not end although it was killed; another takes its place", self.pid)
        (self._writer or self._socket).close()

    async def _death(self) -> WorkerDied:
        self.kill()  # it may have closed its socket and still run
        status = await asyncio.to_thread(self._process.wait)
        from_outside = status in (-signal.SIGKILL, -signal.SIGTERM)
        reason = f"signal {-status} ended it" if status < 0 else f"it exited with status {status}"
        return WorkerDied(reason, crashed=not from_outside)
