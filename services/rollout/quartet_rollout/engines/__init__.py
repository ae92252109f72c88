"""Engines: what generates tokens, behind one interface.

    base.py               the interface (`Engine`), its data classes and its errors: read this first
    registry.py           engines by name; `create_engine`
    options.py            their options, torch-free
    process_engine.py     what the next two have in common
    vllm_engine/          vLLM: its `AsyncLLM`, and what is added to its workers
    transformers_engine/  plain `transformers`: a continuous decode loop with KV cache and its own sampler
    weight_group.py       the workers as members of a weight group, each call with a deadline
    model_folder.py       tokenizer, context and element type of a Hugging Face folder
    masks.py              sampling masks: the candidates that the filters left

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
