"""Engines: what generates tokens, behind one interface.

    base.py               the interface (`Engine`), its data classes and its errors: read this first
    registry.py           engines by name; `create_engine`
    options.py            their options, torch-free
    core.py               the synchronous half of an engine, stepped by hand (`Core`)
    stepping.py           a core's completions between its steps: admission, pauses, ends, versions
    threaded.py           the two on a thread of their own, as an `Engine`
    weight_updates.py     group, manifest and transfer beside the engine, each with a deadline
    model_folder.py       tokenizer, parameter names and element type of a Hugging Face folder
    vllm_engine/          vLLM: its engine core in-process or in processes, and its weight-transfer backend
    transformers_engine/  plain `transformers`: a continuous decode loop with KV cache and its own sampler

The tests of `tests/engines` are a contract that each engine passes.
"""

from quartet_rollout.engines.base import (
    Engine,
    EngineCompletion,
    EngineError,
    EngineStats,
    ManifestError,
    PromptError,
    SamplingSettings,
    WeightGroupInfo,
    WeightInstallError,
    WeightTransferError,
)
from quartet_rollout.engines.registry import create_engine, engine_names, options_model

__all__ = [
    "Engine",
    "EngineCompletion",
    "EngineError",
    "EngineStats",
    "ManifestError",
    "PromptError",
    "SamplingSettings",
    "WeightGroupInfo",
    "WeightInstallError",
    "WeightTransferError",
    "create_engine",
    "engine_names",
    "options_model",
]
