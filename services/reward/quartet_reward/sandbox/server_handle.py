"""One fork server, seen from the service: start it, give it jobs, hear of their ends; and the users that it has."""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
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

_PLACE, _MOST_PLACES = 64, 64  # where users may begin: at every 64th from `reward.sandbox.first_uid` on
_USERS = Path("/run" if os.access("/run", os.W_OK) else tempfile.gettempdir(), "quartet-sandbox-users")

_START_SECONDS = 60.0
_END_SECONDS = 10.0
_FOLDER = Path(__file__).resolve().parents[2]
# Run by an interpreter that sees no site-packages (-I -S): the package's folder is its first argument.
_LAUNCHER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from quartet_reward.sandbox.isolation import main; sys.exit(main())"
)
# fmt: off
PRELOAD = (
    "array", "base64", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "math", "operator",
    "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading", "typing", "unittest",
)
"""What programs often import: in memory once, shared by all."""
# fmt: on
ENTRIES = {
    "script": "quartet_reward.sandbox.child",
    "candidate": "quartet_reward.code.candidate",
    "judge": "quartet_reward.code.judge",
}
"""What a job can run: modules that the fork server loads by name, each with `main(payload)`.

`main` is called in the new process, confined, with the job's payload. What it raises ends the process as in any Python
program: SystemExit with its code, MemoryError as MEMORY_EXCEEDED, anything else with a traceback and status 1.
"""
Hear = Callable[[dict[str, Any], list[int]], None]


def take_users(wanted: int, count: int) -> tuple[int, int]:
    """Take `count` users from `wanted` on, or from the first place after it where no other sandbox has them.

    Returns:
        The first of them, and a descriptor: they are had until it is closed.

    Raises:
        SandboxUnavailable: there are none, or the file that says so cannot be written.
    """
    file = -1
    try:
        file = os.open(_USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(file).st_uid != os.geteuid():
            raise PermissionError(f"{_USERS} is not this user's")
        for first in range(wanted, wanted + _MOST_PLACES * _PLACE, _PLACE):
            with contextlib.suppress(BlockingIOError):  # a byte stands for a user: struct flock
                lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
                return first, file
    except OSError as error:
        reason = f"cannot tell other sandboxes which users are taken: {error}"
    else:
        reason = (
            f"other sandboxes have all users from {wanted} to {wanted + _MOST_PLACES * _PLACE - 1}: set "
            "reward.sandbox.first_uid to others"
        )
    if file >= 0:
        os.close(file)
    raise SandboxUnavailable(reason)


class ServerHandle:
    """A fork server's process and the channel to it."""

    def __init__(self, mode: Mode, section: SandboxSection):
        """Start the process. As root, it has a user of its own, and one for each slot.

        Raises:
            SandboxUnavailable: there are no users to be had, or there can be no process.
        """
        self._mode = mode
        first_uid, users, self._users = 0, 0, -1
        if os.geteuid() == 0:
            users = 1 + section.slots
            first_uid, self._users = take_users(section.first_uid, users)
        self._names = itertools.count()
        self._jobs: dict[int, Hear] = {}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "mode": mode.value,
            "first_uid": first_uid,
            "uids": users,
            "packages": list(section.packages),
            "preload": PRELOAD,
            "entries": ENTRIES,
            "parent": os.getpid(),
        }
        python = section.python or getattr(sys, "_base_executable", sys.executable)
        command = [python, "-I", "-S", "-c", _LAUNCHER, str(_FOLDER), str(theirs.fileno()), json.dumps(settings)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            self._release()
            raise SandboxUnavailable(f"the fork server could not start: {error}") from error
        self._channel.setblocking(False)
        self.gone = asyncio.Event()
        self.last_words = ""
        """Why it died, if it could still say so."""
        self.base_bytes = 0
        """Resident memory that every program has from the beginning."""
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._channel, self._hear)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def await_ready(self) -> None:
        """Wait until it serves. Raises SandboxUnavailable with the reason why it cannot."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                message = await asyncio.shield(self._ready)
        except TimeoutError:
            raise SandboxUnavailable(f"the fork server was not ready within {_START_SECONDS:g} s") from None
        if message["event"] != "ready":
            raise SandboxUnavailable(f"the fork server could not start: {message['reason']}")
        self.base_bytes = message["resident_bytes"]

    def send(self, slot: int, message: dict[str, Any], descriptors: list[int], hear: Hear) -> int:
        """Ask for a job; return its name. `hear` is called with each message about it. Raises SandboxUnavailable."""
        name = next(self._names)
        uid = 1 + slot if self._users >= 0 and self._mode is not Mode.NAMESPACES else 0
        if self.gone.is_set():
            raise SandboxUnavailable("the fork server has died")
        self._jobs[name] = hear
        try:
            send_message(self._channel, {**message, "job": name, "uid": uid}, descriptors)
        except OSError as error:
            del self._jobs[name]
            raise SandboxUnavailable(f"the fork server takes no jobs: {error}") from error
        return name

    def forget(self, name: int) -> None:
        """Nothing more will be heard of a job."""
        self._jobs.pop(name, None)

    def kill(self) -> None:
        """End the fork server and all that it started."""
        self._process.kill()

    async def close(self) -> None:
        """End it, wait until it and all that it started is gone, and tell every job's `hear`."""
        if not self.gone.is_set():
            asyncio.get_running_loop().remove_reader(self._channel)  # its end must not have the process killed
            with contextlib.suppress(OSError):  # it has just gone
                self._channel.shutdown(socket.SHUT_WR)  # it ends by itself, when all that it started has
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self._process.wait)
        self._lose()
        self._release()

    def _release(self) -> None:
        """Leave the users to others; may be called again."""
        if self._users >= 0:
            os.close(self._users)
            self._users = -1

    def _hear(self) -> None:
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
            elif hear := self._jobs.get(message["job"]):
                hear(message, descriptors)
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
        for hear in list(self._jobs.values()):
            hear({"event": "lost", "reason": f"the fork server has died {self.last_words}".strip()}, [])
        self._jobs.clear()
