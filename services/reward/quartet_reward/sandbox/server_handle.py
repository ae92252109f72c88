"""One fork server, seen from the service: start it, give it jobs, hear of their ends; and the users that it has."""

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from quartet_reward.config import Mode
from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.sandbox.fork_server import ChannelClosed, close_all, receive_message, send_message

_BLOCK = 64  # users are taken in blocks of so many, a locked file each
_MOST_BLOCKS = 64  # from `reward.sandbox.first_uid` on

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


class Users:
    """A range of user ids, had until `release` or the process's end."""

    def __init__(self, wanted: int, count: int):
        """Take `count` users from `wanted` on, or from the first place after it where they are free.

        Raises:
            SandboxUnavailable: there are none, or the files that say so cannot be written.
        """
        self._locks: list[int] = []
        try:
            folder = _folder()
            for place in range(_MOST_BLOCKS):
                self.first = wanted + place * _BLOCK
                if self._take(folder, range(self.first // _BLOCK, (self.first + count - 1) // _BLOCK + 1)):
                    return
        except OSError as error:
            raise SandboxUnavailable(f"cannot tell other sandboxes which users are taken: {error}") from error
        raise SandboxUnavailable(
            f"other sandboxes have all users from {wanted} to {wanted + _MOST_BLOCKS * _BLOCK - 1}: set "
            "reward.sandbox.first_uid to others"
        )

    def release(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()

    def _take(self, folder: Path, blocks: range) -> bool:
        for block in blocks:
            lock = os.open(folder / f"users-{block}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._locks.append(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                return False
        return True


def _folder() -> Path:
    """Return the folder of the locks, which only root may write."""
    base = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
    folder = base / "quartet-sandbox"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


class ServerHandle:
    """A fork server's process and the channel to it."""

    def __init__(self, mode: Mode, uids: range, packages: tuple[str, ...], python: str):
        """Start the process.

        Args:
            mode: how it isolates programs.
            uids: users of its own: its own and one a slot; empty: the service's user.
            packages: folders that programs may import from.
            python: its interpreter; empty: the service's own.

        Raises:
            OSError: there can be no process.
        """
        self._jobs: dict[int, Hear] = {}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "mode": mode.value,
            "first_uid": uids.start,
            "uids": len(uids),
            "packages": list(packages),
            "preload": PRELOAD,
            "entries": ENTRIES,
            "parent": os.getpid(),
        }
        python = python or getattr(sys, "_base_executable", sys.executable)
        command = [python, "-I", "-S", "-c", _LAUNCHER, str(_FOLDER), str(theirs.fileno()), json.dumps(settings)]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._channel.setblocking(False)
        self.gone = asyncio.Event()
        self.last_words = ""
        """Why it died, if it could still say so."""
        self.entries: frozenset[str] = frozenset()
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
        self.entries = frozenset(message["entries"])
        self.base_bytes = message["resident_bytes"]

    def send(self, name: int, message: dict[str, Any], descriptors: list[int], hear: Hear) -> None:
        """Ask for a job; `hear` is called with each message about it. Raises SandboxUnavailable."""
        if self.gone.is_set():
            raise SandboxUnavailable("the fork server has died")
        self._jobs[name] = hear
        try:
            send_message(self._channel, message, descriptors)
        except OSError as error:
            del self._jobs[name]
            raise SandboxUnavailable(f"the fork server takes no jobs: {error}") from error

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
