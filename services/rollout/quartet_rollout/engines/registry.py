"""Which engines there are. A new engine is one module and one line here; tests/engines tests each of them.

Other packages bring engines by entry points of the group `quartet.engines` (docs/extend.md shows one). An entry point's
name is the engine's. Only the engine that a run names is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from quartet_common.plugins import load_plugins
from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.options import EngineOptions, EngineParameters, TransformersOptions, VllmOptions

ENTRY_POINT_GROUP = "quartet.engines"
_PARTS = ("name", "description", "parameters", "create")


class EnginePlugin(Protocol):
    """What an entry point names: a class of no arguments that makes engines. Its module is imported before the number
    of threads is set, so it imports torch and the like within `create`, or within the engine's `start`."""

    name: ClassVar[str]
    """As its entry point's."""
    description: ClassVar[str]
    """What it is, in a sentence."""
    parameters: ClassVar[type[EngineParameters]]
    """The model of its parameters."""

    def create(self, model_path: str, parameters: Any) -> Engine:
        """Make an engine of a Hugging Face folder; nothing is loaded before its `start`."""
        ...


def plugin_names() -> list[str]:
    """Names of the engines that installed packages bring."""
    return sorted(entry_points(group=ENTRY_POINT_GROUP).names)


def load_plugin(name: str) -> EnginePlugin:
    """Return one of them. Raises ConfigError when it cannot be loaded or is no engine, KeyError for another name."""
    points = entry_points(group=ENTRY_POINT_GROUP, name=name)
    return load_plugins("engine", ENTRY_POINT_GROUP, (), _PARTS, EngineParameters, points)[name]


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
