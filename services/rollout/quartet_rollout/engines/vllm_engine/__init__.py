"""vLLM as an engine, by its public API: `AsyncLLM`, whose engine core and workers have processes of their own.

    environment.py      what must be set before vLLM is imported
    arguments.py        options as vLLM's engine arguments, sampling settings as its own
    engine.py           `VllmEngine`
    worker.py           what is added to vLLM's workers
    weight_transfer.py  the workers' weight transfer engine: receives on a thread, installs between two steps
    masks.py            the candidates that vLLM's sampler left

`engines/vllm_names.py` lists every name of vLLM that these modules use.
"""

from __future__ import annotations

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.options import VllmOptions
from quartet_rollout.engines.vllm_engine.environment import prepare

__all__ = ["create", "prepare"]


def create(model_path: str, options: VllmOptions) -> Engine:
    """The engine, after `prepare`; nothing is loaded before its `start`."""
    from quartet_rollout.engines.vllm_engine.engine import VllmEngine

    return VllmEngine(model_path, options)
