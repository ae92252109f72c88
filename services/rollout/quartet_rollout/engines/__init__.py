"""Engines: what generates tokens, behind one interface.

    base.py               the interface (`Engine`) and its data classes: read this first
    registry.py           engines by name; `create_engine`
    options.py            their options, torch-free
    process_engine.py     base class of the next two
    forking.py            forks an engine's process from the rollout's
    vllm_engine/          vLLM: its `AsyncLLM`, and what is added to its workers
    transformers_engine/  plain `transformers`: a continuous decode loop with KV cache and its own sampler
    weight_group.py       joining the weight group and receiving weights that fit the model, with deadlines
    model_folder.py       tokenizer, context and element type of a Hugging Face folder
    masks.py              sampling masks: the candidates that the filters left

Each engine passes the contract tests in `tests/engines`.
"""

from quartet_rollout.engines.base import (  # noqa: F401 (the package's interface)
    Engine,
    EngineCompletion,
    EngineError,
    ManifestError,
    PromptError,
    SamplingSettings,
    WeightGroupInfo,
    WeightInstallError,
    WeightTransferError,
)
from quartet_rollout.engines.registry import create_engine  # noqa: F401
