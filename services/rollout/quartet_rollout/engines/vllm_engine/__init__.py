"""vLLM as an engine.

    environment.py      what must be set before vLLM is imported; its logs into ours
    arguments.py        our options as vLLM's engine arguments, our sampling settings as its own
    core.py             vLLM as a `Core`
    client.py           its engine core, in this process or in processes of its own
    rows.py             what has been generated of each completion
    masks.py            the candidates that its sampler left
    worker.py           what is added to its workers
    weight_transfer.py  "quartet_gloo": installs received buckets through vLLM's weight-transfer API

vLLM's interfaces move from release to release: what is read from its insides is in these modules only, for the version
that requirements.txt pins.
"""

from __future__ import annotations

from quartet_rollout.engines.core import Core
from quartet_rollout.engines.options import VllmOptions
from quartet_rollout.engines.vllm_engine.environment import prepare

__all__ = ["build", "prepare"]


def build(model_path: str, options: VllmOptions) -> Core:
    """The core, after `prepare`. Raises EngineError."""
    from quartet_rollout.engines.vllm_engine.core import VllmCore

    return VllmCore(model_path, options)
