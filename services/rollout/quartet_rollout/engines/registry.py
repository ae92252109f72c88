"""Which engines there are. A new engine is one module and one line here; tests/engines tests each of them.

Engines of other packages are in `plugins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.options import EngineOptions, TransformersOptions, VllmOptions
from quartet_rollout.engines.plugins import load_plugin, plugin_names

# Name: (its options, the module with prepare(options) and create(model_path, options)). Imported only when used.
_ENGINES: dict[str, tuple[type[EngineOptions], str]] = {
    "vllm": (VllmOptions, "quartet_rollout.engines.vllm_engine"),
    "transformers": (TransformersOptions, "quartet_rollout.engines.transformers_engine"),
}


def engine_names() -> list[str]:
    """Names of all engines, those of installed packages included."""
    return sorted({*_ENGINES, *plugin_names()})


def options_model(name: str) -> type[BaseModel]:
    """The pydantic model of an engine's options. Raises ValueError for an unknown name, ConfigError for an engine of a
    package that cannot be loaded."""
    if name not in engine_names():
        raise ValueError(f"engine '{name}' does not exist; allowed: {', '.join(engine_names())}")
    return _ENGINES[name][0] if name in _ENGINES else load_plugin(name).parameters


def create_engine(name: str, model_path: str, options: Mapping[str, Any] | BaseModel | None = None) -> Engine:
    """Make an engine; nothing is loaded before its `start`.

    Args:
        name: a registered name.
        model_path: a Hugging Face model folder.
        options: the engine's options, as its options model or as a mapping.

    Raises:
        ValueError: unknown name, or options that its model refuses (pydantic.ValidationError is one).
    """
    model = options_model(name)
    checked = options if isinstance(options, model) else model.model_validate(dict(options or {}))
    if name not in _ENGINES:
        return load_plugin(name).create(model_path, checked)
    module = import_module(_ENGINES[name][1])
    module.prepare(checked)
    return module.create(model_path, checked)
