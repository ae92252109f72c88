"""Plain `transformers` as an engine: small, readable, and right; for laptops and for checking other engines.

core.py       the decode loop: admission, one token a step for every running completion, ends
rows.py       running completions, and a table of what a step must know of each
slots.py      their keys and values; rows come and go without the others being touched
attention.py  attention of one new token for each row; which layers can be served
sampler.py    temperature, min_p, top_k, top_p, and the log-prob of what was drawn
"""

from __future__ import annotations

from quartet_rollout.engines.core import Core
from quartet_rollout.engines.options import TransformersOptions


def prepare(options: TransformersOptions) -> None:
    """Nothing that must be set before torch is imported."""


def build(model_path: str, options: TransformersOptions) -> Core:
    """The core. Raises EngineError."""
    from quartet_rollout.engines.transformers_engine.core import TransformersCore

    return TransformersCore(model_path, options)
