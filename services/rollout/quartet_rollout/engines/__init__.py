"""Engines: what generates tokens, behind one interface.

    base.py               the interface (`Engine`), its data classes and its errors: read this first
    registry.py           engines by name; `create_engine`
    options.py            their options, torch-free
    vllm_engine/          vLLM: its `AsyncLLM`, and what is added to its workers
    vllm_names.py         what is used of vLLM's public API
    transformers_engine/  plain `transformers`: a continuous decode loop with KV cache and its own sampler
    weight_updates.py     group, manifest and transfer beside the engine, each with a deadline
    model_folder.py       tokenizer, parameter names and element type of a Hugging Face folder

    core.py               the synchronous half of an engine, stepped by hand (`Core`)
    stepping.py           a core's completions between its steps: admission, pauses, ends, versions
    runner.py             the two on one thread, which does what others ask between two steps
    stepped.py            the event loop's half, an `Engine` over whatever hosts a runner (`Host`)
    thread_host.py        a runner on a thread of the rollout
    process_host.py       a runner in a process of its own: child.py is that process, wire.py what the two say
    arena.py              weights to that process: memory that both map

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
