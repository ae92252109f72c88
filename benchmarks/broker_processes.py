"""Helpers of the broker's benchmarks: a Redis as the launcher starts it, and CPU times of processes."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from quartet_local.process import RedisProcess, find_server


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run a Redis as the launcher does; yield its URL and its process."""
    with asyncio.Runner() as runner:

        async def start() -> RedisProcess:
            server = RedisProcess(find_server(), folder / "redis", folder / "redis.log", folder, memory_share=0.25)
            server.start()
            await asyncio.wait_for(server.until_answers(), 20)
            return server

        server = runner.run(start())
        try:
            yield server.url, listener(server.url.removeprefix("unix://"))
        finally:
            runner.run(server.stop(5, asyncio.Event()))


def listener(address: str) -> psutil.Process:
    """Return the descendant that listens at a loopback address or at the path of a socket."""
    port = address.rpartition(":")[2]
    for child in psutil.Process().children(recursive=True):
        inet = {str(each.laddr.port) for each in child.net_connections() if each.status == psutil.CONN_LISTEN}
        if port in inet | {each.laddr for each in child.net_connections("unix")}:
            return child
    raise RuntimeError(f"no process of this benchmark listens on {address}")


def cpu_seconds(process: psutil.Process) -> float:
    """Return what a process has used, with its children that ended: Redis rewrites its file in one."""
    return sum(process.cpu_times()[:4])
