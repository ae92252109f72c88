"""The processes of one training job on this host.

Rank 0 is the process that the user started; it starts the others with the same command line and RANK set. Under
torchrun, which sets RANK (several hosts), it starts none.
"""

import asyncio
import os
import signal
import subprocess
import sys
from typing import NoReturn

from quartet_common.config import ConfigError, split_address
from quartet_common.log import get_logger
from quartet_common.ports import free_port
from quartet_trainer.errors import TrainingError

log = get_logger(__name__)

_OF_RANK_0 = "QUARTET_STARTED_BY_RANK_0"


def rank() -> int:
    """Return this process's rank; 0 if RANK is not set."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks; 1 if WORLD_SIZE is not set."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def starter() -> int | None:
    """Return the process that started this rank and ends it: rank 0, or torchrun's agent; None if it was by hand."""
    return os.getppid() if _OF_RANK_0 in os.environ or "TORCHELASTIC_RUN_ID" in os.environ else None


def check_environment() -> None:
    """Raise ConfigError if torchrun's variables, which may be set by hand, are not those of a rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise ConfigError(f"{name}: got '{value}'; allowed: a number")
    if rank() >= world_size() or ("WORLD_SIZE" in os.environ and "RANK" not in os.environ):
        raise ConfigError(f"RANK: got {os.environ.get('RANK')}; allowed: 0 to WORLD_SIZE - 1, {world_size() - 1}")
    if world_size() > 1:
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        try:
            split_address(f"{host}:{port}")
        except ValueError as error:
            allowed = f"rank 0's host and a port of it, as WORLD_SIZE is {world_size()}"
            raise ConfigError(f"MASTER_ADDR, MASTER_PORT: got '{host}', '{port}'; allowed: {allowed}") from error


def leave_process(status: int) -> NoReturn:
    """Flush the output and end this process without shutting the interpreter down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM: rank 0 ends the others, even when the whole process group gets the signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class WorkerProcesses:
    """Ranks 1 and up, as subprocesses of rank 0."""

    def __init__(self, ranks: int):
        """Start them, with this process as rank 0. With one rank, or under torchrun, do nothing."""
        self._processes: list[subprocess.Popen] = []
        if ranks == 1 or "RANK" in os.environ:
            return
        port = free_port()
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        for worker in range(1, ranks):
            own = {"RANK": str(worker), "LOCAL_RANK": str(worker), _OF_RANK_0: "1"}
            environment = {**os.environ, **world, **own}
            command = [sys.executable, "-m", "quartet_trainer", *sys.argv[1:]]
            self._processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        os.environ.update(world, RANK="0", LOCAL_RANK="0")
        log.info("started ranks", extra={"ranks": ranks, "pids": [process.pid for process in self._processes]})

    async def watch(self) -> None:
        """Return when all have ended with status 0. Raises TrainingError when one ends with another status."""
        running = dict(enumerate(self._processes, start=1))
        while running:
            for worker, process in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[worker]
                    if code:
                        raise TrainingError(f"rank {worker} ended with status {code}")
            await asyncio.sleep(0.2)

    async def end(self, grace: float) -> None:
        """Wait until all have ended; kill each that does not end within `grace` seconds."""
        for process in self._processes:
            try:
                await asyncio.to_thread(process.wait, grace)
            except subprocess.TimeoutExpired:
                log.warning("rank does not end, killing it", extra={"pid": process.pid})
                process.kill()
                process.wait()
