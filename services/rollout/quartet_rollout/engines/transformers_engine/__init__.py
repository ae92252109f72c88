"""Plain `transformers` as an engine: small, readable, and right; for laptops and for checking other engines.

core.py     the decode loop: admission, one token a step for every running completion, ends
batch.py    running completions and their left-padded KV cache; rows come and go
sampler.py  temperature, min_p, top_k, top_p, and the log-prob of what was drawn
"""

from __future__ import annotations

from functools import partial

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.core import Core
from quartet_rollout.engines.model_folder import load_spec, load_tokenizer
from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.threaded import ThreadedEngine


def create(model_path: str, options: TransformersOptions) -> Engine:
    """An engine; nothing is loaded before its start."""

    def build() -> Core:
        from quartet_rollout.engines.transformers_engine.core import TransformersCore

        return TransformersCore(model_path, options)

    return ThreadedEngine("transformers", build, partial(load_tokenizer, model_path), partial(load_spec, model_path))
