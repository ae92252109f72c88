"""The engine core as a fork of the rollout, with vLLM imported.

vLLM spawns it on a CPU, so it imports torch and vLLM again: five seconds of processor time. The fork imports what only
a worker needs, and waits for the work that `AsyncLLM` gives to the process that it starts.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any

import vllm.v1.engine.utils

from quartet_rollout.engines.forking import ForkedProcess
from quartet_rollout.engines.vllm_engine import disable_compilation
from quartet_rollout.engines.vllm_engine.worker import end_with

_OF_WORKERS = ("vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker")


def fork_engine_core() -> None:
    """Fork the process of this rollout's first engine core."""
    ours, theirs = multiprocessing.Pipe()
    context = _Context(_Core("EngineCore", _work, ours, theirs, os.getpid()), ours)
    theirs.close()
    # vllm/v1/engine/utils.py:256: get_mp_context spawns every process on a CPU (vllm/platforms/cpu.py:409).
    vllm.v1.engine.utils.get_mp_context = lambda: context


class _Core(ForkedProcess):
    """Runs already: `start` sends it its work, with the variables that were set since the fork."""

    work: tuple[Connection, Callable[..., Any], Mapping[str, Any]]

    def start(self) -> None:
        connection, *work = self.work
        connection.send((dict(os.environ), *work))
        connection.close()


class _Context(SpawnContext):
    """Gives the fork to the first that asks for a process, and spawns the others."""

    def __init__(self, core: _Core, connection: Connection) -> None:
        super().__init__()
        self._core: _Core | None = core
        self._connection = connection

    def Process(self, target: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> Any:  # type: ignore[override]
        core, self._core = self._core, None
        if core is None:
            return super().Process(target=target, name=name, kwargs=kwargs)
        core.work = self._connection, target, kwargs
        return core


def _work(ours: Connection, theirs: Connection, owner: int) -> None:
    """Wait for the engine core's work and do it; end with the rollout."""
    ours.close()
    end_with(owner)
    for name in _OF_WORKERS:
        importlib.import_module(name)
    gc.freeze()
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
