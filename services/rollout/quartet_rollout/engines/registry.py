"""Engines by name. A new engine is one module and one line here; tests/engines tests each of them.

Other packages bring engines by entry points of the group `quartet.engines` (docs/extend.md shows one). An entry point's
name is the engine's. Only the engine that a run names is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from quartet_rollout.engines.base import Engine
from quartet_rollout.engines.forking import can_fork
from quartet_rollout.engines.options import EngineParameters
from quartet_server.plugins import load_plugins

ENTRY_POINT_GROUP = "quartet.engines"
_PARTS = ("name", "description", "parameters", "create")
_BUILT_IN = (
    EntryPoint("transformers", "quartet_rollout.engines.transformers_engine:TransformersPlugin", ENTRY_POINT_GROUP),
    EntryPoint("vllm", "quartet_rollout.engines.vllm_engine:VllmPlugin", ENTRY_POINT_GROUP),
)


class EnginePlugin(Protocol):
    """The class that an entry point names; it is instantiated without arguments. Its module is imported before the
    number of threads is set, so it imports torch and the like within `create`, or within the engine's `start`."""

    name: ClassVar[str]
    """As its entry point's."""
    description: ClassVar[str]
    """What it is, in a sentence."""
    parameters: ClassVar[type[EngineParameters]]
    """The model of its parameters."""

    def create(self, model_path: str, parameters: Any) -> Engine:
        """Make an engine of a Hugging Face folder; nothing is loaded before its `start`."""
        ...


def _points() -> EntryPoints:
    return EntryPoints((*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP)))


def load_plugin(name: str) -> EnginePlugin:
    """Load one engine's plugin. Raises ConfigError when it cannot be loaded or is no engine, KeyError for an unknown
    name."""
    points = _points().select(name=name)
    return load_plugins("engine", ENTRY_POINT_GROUP, (), _PARTS, EngineParameters, points)[name]


def engine_names() -> list[str]:
    """Names of all engines, those of installed packages included."""
    return sorted(_points().names)


def prepare_engine(name: str, model_path: str, options: BaseModel) -> None:
    """Let an engine of this package fork its process, where that is possible. Call it before anything starts a thread.
    A library that cannot be imported is reported by `create_engine`."""
    prepare = getattr(load_plugin(name), "prepare", None)
    if prepare is not None and can_fork():
        with suppress(ImportError):
            prepare(model_path, options)


def create_engine(name: str, model_path: str, options: Mapping[str, Any] | BaseModel | None = None) -> Engine:
    """Make an engine; nothing is loaded before its `start`.

    Args:
        name: one of `engine_names`.
        model_path: a Hugging Face model folder.
        options: the engine's options, as its options model or as a mapping.

    Raises:
        ValueError: unknown name, or options that its model rejects (pydantic.ValidationError is one).
        ConfigError: an engine of another package cannot be loaded.
    """
    if name not in engine_names():
        raise ValueError(f"engine '{name}' does not exist; allowed: {', '.join(engine_names())}")
    plugin = load_plugin(name)
    if not isinstance(options, plugin.parameters):
        options = plugin.parameters.model_validate(dict(options or {}))
    return plugin.create(model_path, options)
