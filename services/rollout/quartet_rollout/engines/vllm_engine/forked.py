"""An engine core that is forked from the rollout, with vLLM imported.

vLLM spawns its engine core on a CPU, which imports torch and vLLM again: five seconds of processor time. Here the
process is forked while the rollout has no threads, imports what only a worker needs, and waits for the work that
`AsyncLLM` gives to the process that it starts. A rollout with CUDA spawns: its processes may not share a driver.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any

import vllm.v1.engine.utils

from quartet_rollout.engines.vllm_engine import disable_compilation
from quartet_rollout.engines.vllm_engine.worker import end_with

_OF_WORKERS = ("vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker")
_GC_THRESHOLD = 100_000


def fork_engine_core() -> None:
    """Fork the process of this rollout's first engine core, if nothing has started a thread yet."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        logging.getLogger(__name__).warning("the engine core is not forked: the rollout has %d threads", threads)
        return
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_work, args=(ours, theirs, os.getpid()), name="EngineCore")
    process.start()
    theirs.close()
    atexit.register(process.kill)  # multiprocessing waits for it at exit
    # vllm/v1/engine/utils.py:256: get_mp_context spawns every process on a CPU (vllm/platforms/cpu.py:409).
    vllm.v1.engine.utils.get_mp_context = lambda: _Context(process, ours)


class _Context(SpawnContext):
    """Gives the forked process to the first that asks for one, and spawns the others."""

    _given = False

    def __init__(self, process: Any, connection: Connection) -> None:
        super().__init__()
        self._forked = process, connection

    def Process(self, target: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> Any:  # type: ignore[override]
        if _Context._given:
            return super().Process(target=target, name=name, kwargs=kwargs)
        _Context._given = True
        return _Forked(*self._forked, target, kwargs)


class _Forked:
    """A `multiprocessing.Process` that runs already: `start` sends it what to do."""

    def __init__(
        self, process: Any, connection: Connection, target: Callable[..., Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._process, self._connection = process, connection
        self._work = target, kwargs

    def start(self) -> None:
        """Send the work, with the variables that were set since the fork."""
        self._connection.send((dict(os.environ), *self._work))
        self._connection.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def _work(ours: Connection, theirs: Connection, owner: int) -> None:
    """Wait for the engine core's work and do it; end with the rollout."""
    ours.close()
    end_with(owner)
    for name in _OF_WORKERS:
        importlib.import_module(name)
    gc.freeze()  # the collector would touch, and so copy, what is shared with the rollout
    gc.set_threshold(_GC_THRESHOLD)
    gc.enable()
    try:
        variables, target, arguments = theirs.recv()
    except EOFError:
        return
    theirs.close()
    for removed in os.environ.keys() - variables.keys():
        del os.environ[removed]
    os.environ.update(variables.items() - os.environ.items())  # the others stay: the process's title is found by them
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        disable_compilation()
    target(**arguments)
