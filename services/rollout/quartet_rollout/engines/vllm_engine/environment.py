"""What must be set before vLLM, and best before torch, is imported."""

from __future__ import annotations

import logging
import os
import warnings

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
    """Set the environment of this process and its children. What the user has set himself stays."""
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
