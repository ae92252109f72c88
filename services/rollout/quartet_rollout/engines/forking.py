"""Forks an engine's process from the rollout while that has no threads, with what both import. Imports no engine.

Only with a torch for the CPU: processes may not share a CUDA driver.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import multiprocessing
import os
from importlib.metadata import version
from multiprocessing.connection import wait
from typing import Any

from quartet_common.log import get_logger

log = get_logger(__name__)


def can_fork() -> bool:
    """Return whether this process may fork an engine's."""
    cpu, threads = "+cpu" in version("torch"), len(os.listdir("/proc/self/task"))
    if cpu and threads > 1:
        log.info("the engine's process is not forked: the rollout has %d threads", threads)
    return cpu and threads == 1


class ForkedProcess:
    """A `multiprocessing.Process` that has been started as a fork, with an awaitable `wait`."""

    def __init__(self, **arguments: Any) -> None:
        gc.freeze()  # the collector of either process would touch, and so copy, what they share
        self._process: Any = multiprocessing.get_context("fork").Process(**arguments)
        self._process.start()
        atexit.register(self._process.kill)  # else multiprocessing waits for it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    async def wait(self) -> int:
        """Wait for its exit; return the exit status, negative for a signal."""
        await asyncio.to_thread(wait, [self._process.sentinel])
        self._process.join()
        return self._process.exitcode
