"""Engines that other packages bring, by entry points of the group `quartet.engines`. docs/extend.md shows one.

An entry point's name is the engine's. Only the engine that a run names is loaded.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field

from quartet_common.plugins import load_plugins
from quartet_rollout.engines.base import Engine

ENTRY_POINT_GROUP = "quartet.engines"
_PARTS = ("name", "description", "parameters", "create")


class EngineParameters(BaseModel):
    """What every such engine can be told, in `[rollout.engine_parameters]`. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_model_len: int | None = Field(
        None, ge=2, description="Longest context in tokens, prompt and completion. Unset: what the model allows."
    )
    threads: int = Field(1, ge=1, description="Torch threads on the CPU.")


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
