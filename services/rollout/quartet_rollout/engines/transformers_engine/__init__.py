"""Plain `transformers` as an engine: small, readable, and right; for laptops and for checking other engines.

core.py       the decode loop: admission, one token a step for every running completion, ends
rows.py       running completions, and a table of what a step must know of each
slots.py      their keys and values; rows come and go without the others being touched
attention.py  attention of one new token for each row; which layers can be served
sampler.py    temperature, min_p, top_k, top_p, and the log-prob of what was drawn
"""

from __future__ import annotations

from functools import partial

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.core import Core
from quartet_rollout.engines.model_folder import load_spec, load_tokenizer
from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.process_host import ProcessHost
from quartet_rollout.engines.stepped import Host, SteppedEngine
from quartet_rollout.engines.thread_host import ThreadHost


def prepare(options: TransformersOptions) -> None:
    """Nothing that must be set before torch is imported."""


def create(model_path: str, options: TransformersOptions) -> Engine:
    """The engine, where its options say that it computes; nothing is loaded before its `start`."""
    host: Host
    if _in_a_process(options):
        host = ProcessHost("transformers", model_path, options)
    else:
        host = ThreadHost("transformers", partial(build, model_path, options))
    return SteppedEngine("transformers", host, partial(load_tokenizer, model_path), partial(load_spec, model_path))


def build(model_path: str, options: TransformersOptions) -> Core:
    """The core. Raises EngineError."""
    from quartet_rollout.engines.transformers_engine.core import TransformersCore

    return TransformersCore(model_path, options)


def _in_a_process(options: TransformersOptions) -> bool:
    if options.place != "auto":
        return options.place == "process"
    if options.device != "auto":
        return options.device == "cpu"
    import torch

    return not torch.cuda.is_available()  # On a GPU weights arrive in its memory, which another process cannot read.
