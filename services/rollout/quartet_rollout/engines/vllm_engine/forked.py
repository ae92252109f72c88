"""The engine core as a fork of the rollout, with vLLM imported.

vLLM spawns it on a CPU, so it imports torch and vLLM again: five seconds of processor time. The fork imports what only
a worker needs, and waits for the work that `AsyncLLM` gives to the process that it starts.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm.v1.engine.utils

from quartet_rollout.engines.forking import ForkedProcess
from quartet_rollout.engines.vllm_engine import disable_compilation
from quartet_rollout.engines.vllm_engine.worker import end_with


def fork_engine_core() -> None:
    """Fork the process of this rollout's engine core."""
    core = _Core()
    # vllm/v1/engine/utils.py:256: get_mp_context spawns every process on a CPU (vllm/platforms/cpu.py:409).
    vllm.v1.engine.utils.get_mp_context = lambda: SimpleNamespace(Process=core.given)


class _Core(ForkedProcess):
    """Runs already: `start` sends it its work, with the variables that were set since the fork."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        super().__init__(target=_work, args=(self._connection, theirs, os.getpid()), name="EngineCore")
        theirs.close()

    def given(self, target: Any, name: str, kwargs: Any) -> _Core:
        """Return this process with what it has to do."""
        self._given = target, kwargs
        return self

    def start(self) -> None:
        self._connection.send((dict(os.environ), *self._given))
        self._connection.close()


def _work(ours: Connection, theirs: Connection, owner: int) -> None:
    """Wait for the engine core's work and do it; end with the rollout."""
    ours.close()
    end_with(owner)
    Path("/proc/self/comm").write_text("EngineCore")  # until vLLM gives it a title, if it can
    importlib.import_module("vllm.v1.worker.cpu_worker")
    gc.freeze()
    gc.enable()
    try:
        variables, target, arguments = theirs.recv()
    except EOFError:
        return
    theirs.close()
    os.environ.update(variables.items() - os.environ.items())  # the others stay: the process's title is found by them
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        disable_compilation()
    target(**arguments)
