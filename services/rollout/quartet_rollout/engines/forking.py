"""Forks the process of an engine while the rollout has no threads, with what both import; imports neither torch nor an
engine.

Only with a build of torch for the CPU: processes may not share a CUDA driver.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import multiprocessing
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quartet_common.log import get_logger

log = get_logger(__name__)


def can_fork() -> bool:
    """Return whether this process may fork an engine's: it has one thread, and torch is for the CPU."""
    try:
        cpu = "+cpu" in version("torch")
    except PackageNotFoundError:
        return False
    if cpu and (threads := len(os.listdir("/proc/self/task"))) > 1:
        log.warning("the engine's process is not forked: the rollout has %d threads", threads)
    return cpu and threads == 1


class ForkedProcess:
    """A fork of this process that runs `target(*arguments)`; `multiprocessing.Process`, with an awaitable `wait`."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        gc.freeze()  # the collector of either process would touch, and so copy, what they share
        self._process = multiprocessing.get_context("fork").Process(name=name, target=target, args=arguments)
        self._process.start()
        atexit.register(self._process.kill)  # else multiprocessing waits for it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    @property
    def returncode(self) -> int | None:
        """As asyncio's and subprocess's: negative for a signal."""
        return self._process.exitcode

    async def wait(self) -> int:
        """Wait for its exit; return the exit status."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self.returncode is not None
        return self.returncode
