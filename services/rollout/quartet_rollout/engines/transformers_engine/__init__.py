"""Plain `transformers` as an engine: small, readable, and right; for laptops and for checking other engines.

engine.py       `TransformersEngine`, in the rollout's event loop
messages.py     what it and its process say to each other
engine_loop.py  that process: steps the decoder, and between two steps pauses, takes weights, aborts
decoder.py      admission, one token a step for every running completion, ends
rows.py         completions that run or wait
slots.py        their keys and values; rows come and go without the others being touched
attention.py    attention of one new token for each row; which layers can be served
sampler.py      temperature, min_p, top_k, top_p, and the log-prob of what was drawn
"""

from __future__ import annotations

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.options import TransformersOptions


def prepare(options: TransformersOptions) -> None:
    """Nothing that must be set before torch is imported."""


def create(model_path: str, options: TransformersOptions) -> Engine:
    """The engine; nothing is loaded before its `start`."""
    from quartet_rollout.engines.transformers_engine.engine import TransformersEngine

    return TransformersEngine(model_path, options)
