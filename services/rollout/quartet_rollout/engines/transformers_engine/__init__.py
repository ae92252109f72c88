"""Plain `transformers` as an engine: small and readable; for laptops and for checking other engines.

engine.py       `TransformersEngine`, in the rollout's event loop
messages.py     messages between it and its child process
__main__.py     the child process's command line
engine_loop.py  the child process: steps the decoder; handles pauses, weights and aborts between two steps
decoder.py      admission, one token per step for every running completion, stop conditions
rows.py         running and waiting completions
slots.py        KV cache with a slot for each running row
attention.py    attention of one new token for each row; supported layers
sampler.py      temperature, min_p, top_k, top_p, and the log-prob of the sampled token
"""

from __future__ import annotations

import importlib

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.options import TransformersOptions


class TransformersPlugin:
    """Its `EnginePlugin`."""

    name = "transformers"
    description = "Plain transformers."
    parameters = TransformersOptions

    def prepare(self, model_path: str, parameters: TransformersOptions) -> None:
        """Import transformers and fork the engine's process, which begins to load."""
        importlib.import_module("transformers.models")
        from quartet_rollout.engines.transformers_engine.engine import fork

        fork(model_path, parameters)

    def create(self, model_path: str, parameters: TransformersOptions) -> Engine:
        from quartet_rollout.engines.transformers_engine.engine import TransformersEngine

        return TransformersEngine(model_path, parameters)
