"""vLLM as an engine, by its public API: `AsyncLLM`, whose engine core and workers are child processes.

arguments.py        translates options to vLLM's engine arguments, sampling settings to its SamplingParams
engine.py           `VllmEngine`
forked.py           the engine core's process, forked with vLLM imported
worker.py           extension of vLLM's workers: calls their weight receiver, records sampling masks
weight_transfer.py  the workers' weight transfer engine: receives on a thread, installs between two steps
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.options import VllmOptions

_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # Its loggers use our handlers.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # Otherwise the CPU's single worker gets a second process.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # The rollout has threads, so it must not fork.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # Hides vLLM's messages about memory binding.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # On a small machine, binding puts every process on the same core.
}


def prepare(options: VllmOptions) -> None:
    """Set environment variables for this process and its children, except those that the user has set. Call it before
    vLLM, and preferably torch, is imported."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    logging.getLogger("vllm").setLevel(options.log_level.upper())
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def disable_compilation() -> None:
    """Disable torch.compile here and in child processes.

    Otherwise even an eager engine compiles the log-prob ranks with a C++ compiler at the first request, which takes
    18 s, or fails without a compiler.
    """
    import torch._dynamo

    torch._dynamo.config.disable = True
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


class VllmPlugin:
    """Its `EnginePlugin`."""

    name = "vllm"
    description = "vLLM's AsyncLLM."
    parameters = VllmOptions

    def prepare(self, model_path: str, parameters: VllmOptions) -> None:
        """Import vLLM and fork the engine core. With torch.compile it is spawned: vLLM sets variables that the compiler
        reads when it is imported."""
        more = parameters.model_extra or {}
        if parameters.enforce_eager is False or {"data_parallel_size", "numa_bind"} & more.keys():
            return
        prepare(parameters)
        importlib.import_module("quartet_rollout.engines.vllm_engine.engine")
        from quartet_rollout.engines.vllm_engine.forked import fork_engine_core

        fork_engine_core()

    def create(self, model_path: str, parameters: VllmOptions) -> Engine:
        prepare(parameters)
        from quartet_rollout.engines.vllm_engine.engine import VllmEngine

        return VllmEngine(model_path, parameters)
