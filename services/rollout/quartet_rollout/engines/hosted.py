"""One of our own engines, where its options say that it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.core import Core
from quartet_rollout.engines.model_folder import load_spec, load_tokenizer
from quartet_rollout.engines.options import EngineOptions, TransformersOptions, VllmOptions
from quartet_rollout.engines.process_host import ProcessHost
from quartet_rollout.engines.stepped import Host, SteppedEngine
from quartet_rollout.engines.thread_host import ThreadHost


def hosted(name: str, model_path: str, options: EngineOptions, build: Callable[[], Core]) -> Engine:
    """An engine over the core that `build` makes, or that a process makes of the same name, model and options."""
    host: Host = ProcessHost(name, model_path, options) if _in_a_process(options) else ThreadHost(name, build)
    return SteppedEngine(name, host, partial(load_tokenizer, model_path), partial(load_spec, model_path))


def _in_a_process(options: EngineOptions) -> bool:
    if options.place != "auto":
        return options.place == "process"
    if isinstance(options, VllmOptions) and options.form == "async":
        return False
    if isinstance(options, TransformersOptions) and options.device != "auto":
        return options.device == "cpu"
    import torch

    return not torch.cuda.is_available()  # On a GPU weights arrive in its memory, which another process cannot read.
