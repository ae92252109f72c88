"""The service's handle of a fork server: starts it, sends it jobs, receives their ends; and reserves its users."""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quartet_reward.config import Mode, SandboxSection
from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.sandbox.fork_server import ChannelClosed, close_all, receive_message, send_message

_RANGE, _MOST_RANGES = 64, 64  # ranges of users begin at every 64th from `reward.sandbox.first_uid` on
_USERS = Path("/run" if os.access("/run", os.W_OK) else tempfile.gettempdir(), "quartet-sandbox-users")

# Of this process and of the fork server: a running job holds six here, and needs as many more while it starts.
_DESCRIPTORS_OF_A_SLOT, _OTHER_DESCRIPTORS = 16, 512
_START_SECONDS = 60.0
_END_SECONDS = 10.0
_FOLDER = Path(__file__).resolve().parents[2]
# Run by an interpreter without site-packages (-I -S): the package's folder is its first argument.
_LAUNCHER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from quartet_reward.sandbox.isolation import main; sys.exit(main())"
)
# fmt: off
PRELOAD = (
    "array", "base64", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "math", "operator",
    "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading", "typing", "unittest",
)
"""Modules that programs often import: the fork server imports them once, and all programs share their memory."""
# fmt: on
ENTRIES = {
    "script": "quartet_reward.sandbox.child",
    "candidate": "quartet_reward.code.candidate",
    "judge": "quartet_reward.code.judge",
}
"""The modules that a job can run; the fork server calls their `main(payload)` in the new, confined process.

What `main` raises ends the process: SystemExit with its code, MemoryError as MEMORY_EXCEEDED, anything else with a
traceback and status 1.
"""
REHEARSAL = "quartet_reward.code.rehearsal"  # whose `rehearse()` the fork server calls before it knows of any job
OnMessage = Callable[[dict[str, Any], list[int]], None]


def take_users(wanted: int, count: int) -> tuple[int, int]:
    """Reserve `count` user ids, starting at `wanted` or at a later range that no other sandbox has reserved.

    Returns:
        The first user id, and the descriptor of the lock file: closing it releases them.

    Raises:
        SandboxUnavailable: all ranges are reserved, or the lock file cannot be written.
    """
    file = -1
    try:
        file = os.open(_USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(file).st_uid != os.geteuid():
            raise PermissionError(f"{_USERS} is not this user's")
        for first in range(wanted, wanted + _MOST_RANGES * _RANGE, _RANGE):
            with contextlib.suppress(BlockingIOError):  # struct flock; byte N of the file stands for user N
                lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
                return first, file
    except OSError as error:
        reason = f"cannot reserve users for the sandbox: {error}"
    else:
        reason = (
            f"other sandboxes have all users from {wanted} to {wanted + _MOST_RANGES * _RANGE - 1}: set "
            "reward.sandbox.first_uid to others"
        )
    if file >= 0:
        os.close(file)
    raise SandboxUnavailable(reason)


def _raise_descriptor_limit(slots: int) -> None:
    """Raise this process's soft limit of file descriptors, which the fork server inherits, to what `slots` need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OTHER_DESCRIPTORS + _DESCRIPTORS_OF_A_SLOT * slots
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


class ServerHandle:
    """A fork server's process and the channel to it."""

    def __init__(self, mode: Mode, section: SandboxSection):
        """Start the process; as root, with a user of its own and one for each slot.

        Raises:
            SandboxUnavailable: no users are free, or the process could not start.
        """
        self._mode = mode
        _raise_descriptor_limit(section.slots)
        first_uid, users, self._users = 0, 0, -1
        if os.geteuid() == 0:
            users = 1 + section.slots
            first_uid, self._users = take_users(section.first_uid, users)
        self._names = itertools.count()
        self._jobs: dict[int, OnMessage] = {}
        settings = {
            "mode": mode.value,
            "first_uid": first_uid,
            "uids": users,
            "packages": list(section.packages),
            "preload": PRELOAD,
            "entries": ENTRIES,
            "rehearsal": REHEARSAL,
            "parent": os.getpid(),
        }
        python = section.python or getattr(sys, "_base_executable", sys.executable)
        try:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                descriptor = theirs.fileno()
                self._process = subprocess.Popen(
                    [python, "-I", "-S", "-c", _LAUNCHER, str(_FOLDER), str(descriptor), json.dumps(settings)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={},
                    pass_fds=[descriptor],
                    start_new_session=True,
                )
        except OSError as error:
            self._release()
            raise SandboxUnavailable(f"the fork server could not start: {error}") from error
        self._channel.setblocking(False)
        self.gone = asyncio.Event()
        self.last_words = ""
        """The reason that it sent before it died, if any."""
        self.base_bytes = 0
        """Resident memory of the fork server, which every program shares at its start."""
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._channel, self._receive)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def await_ready(self) -> None:
        """Wait until it serves. Raises SandboxUnavailable with the reason if it cannot."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                message = await asyncio.shield(self._ready)
        except TimeoutError:
            raise SandboxUnavailable(f"the fork server was not ready within {_START_SECONDS:g} s") from None
        if message["event"] != "ready":
            raise SandboxUnavailable(f"the fork server could not start: {message['reason']}")
        self.base_bytes = message["resident_bytes"]

    def send(self, slot: int, message: dict[str, Any], descriptors: list[int], on_message: OnMessage) -> int:
        """Start a job; return its name. `on_message` gets each message about it. Raises SandboxUnavailable."""
        name = next(self._names)
        uid = 1 + slot if self._users >= 0 and self._mode is not Mode.NAMESPACES else 0
        if self.gone.is_set():
            raise SandboxUnavailable("the fork server has died")
        self._jobs[name] = on_message
        try:
            send_message(self._channel, {**message, "job": name, "uid": uid}, descriptors)
        except OSError as error:
            del self._jobs[name]
            raise SandboxUnavailable(f"a job could not be sent to the fork server: {error}") from error
        return name

    def forget(self, name: int) -> None:
        """Ignore further messages about a job."""
        self._jobs.pop(name, None)

    def kill(self) -> None:
        """Kill the fork server and all its jobs."""
        self._process.kill()

    async def close(self) -> None:
        """End it, wait until it and all its jobs are gone, and send "lost" to the jobs that were still running."""
        if not self.gone.is_set():
            asyncio.get_running_loop().remove_reader(self._channel)  # or the channel's end would kill the process
            with contextlib.suppress(OSError):  # it has just ended
                self._channel.shutdown(socket.SHUT_WR)  # it kills its jobs and ends after them
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self._process.wait)
        self._lose()
        self._release()

    def _release(self) -> None:
        """Release the users; may be called again."""
        if self._users >= 0:
            os.close(self._users)
            self._users = -1

    def _receive(self) -> None:
        while True:
            try:
                message, descriptors = receive_message(self._channel)
            except BlockingIOError:
                return
            except (ChannelClosed, ValueError):
                self._lose()
                return
            if "job" not in message:
                if not self._ready.done():
                    self._ready.set_result(message)
                else:
                    self.last_words = message.get("reason", "")
            elif on_message := self._jobs.get(message["job"]):
                on_message(message, descriptors)
            else:
                close_all(descriptors)

    def _lose(self) -> None:
        if self.gone.is_set():
            return
        self.gone.set()
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        self._process.kill()
        if not self._ready.done():
            self._ready.set_result({"event": "failed", "reason": "it ended at once"})
        for on_message in list(self._jobs.values()):
            on_message({"event": "lost", "reason": f"the fork server has died {self.last_words}".strip()}, [])
        self._jobs.clear()
