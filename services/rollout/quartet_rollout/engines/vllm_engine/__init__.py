"""vLLM as an engine, by its public API: `AsyncLLM`, whose engine core and workers have processes of their own.

arguments.py        options as vLLM's engine arguments, sampling settings as its own
engine.py           `VllmEngine`
worker.py           what is added to vLLM's workers: calls of their weight receiver, sampling masks
weight_transfer.py  the workers' weight transfer engine: receives on a thread, installs between two steps
"""

from __future__ import annotations

import logging
import os
import warnings

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.options import VllmOptions

_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # Its logs go where ours go.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # Else a CPU's single worker has a process beside its engine core's.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # The rollout has threads, which a fork would not survive.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # vLLM's notes on memory binding.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Binding puts every process of a small machine on the same core.
}


def prepare(options: VllmOptions) -> None:
    """Set the environment of this process and its children, before vLLM, and best torch, is imported. What the user
    has set himself stays."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    logging.getLogger("vllm").setLevel(options.log_level.upper())
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def disable_compilation() -> None:
    """Run what vLLM decorates with torch.compile as it stands, here and in child processes.

    Even an eager engine would otherwise compile the ranks of log-probs with a C++ compiler at the first request: 18 s,
    or an error where there is none.
    """
    import torch._dynamo

    torch._dynamo.config.disable = True
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def create(model_path: str, options: VllmOptions) -> Engine:
    """The engine, after `prepare`; nothing is loaded before its `start`."""
    from quartet_rollout.engines.vllm_engine.engine import VllmEngine

    return VllmEngine(model_path, options)
