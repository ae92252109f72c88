"""Transports of weights that other packages bring, by entry points of the group `quartet.transports`.

One entry point for both ends: the trainer's environment and the rollout's both have the package. docs/extend.md shows
one.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from quartet_common.config import ConfigError
from quartet_common.plugins import load_plugins

ENTRY_POINT_GROUP = "quartet.transports"
OWN_TRANSPORTS = ("gloo", "nccl", "file")
# The capability of a transport is weights.NAME, and these of its kind say something else.
_TAKEN = (*OWN_TRANSPORTS, "full", "lora", "in_flight", "store_gate")
_PARTS = ("name", "description", "parameters", "trainer_end", "rollout_end")


class TransportParameters(BaseModel):
    """What such a transport can be told, in `[trainer.weights.transport_parameters]`. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TransportPlugin(Protocol):
    """What an entry point names: a class of no arguments that makes both ends. Its module is imported when a service
    starts, so it imports torch and the like within `trainer_end` and `rollout_end`."""

    name: ClassVar[str]
    """As its entry point's, and as `trainer.weights.transport`."""
    description: ClassVar[str]
    """What it is, in a sentence."""
    parameters: ClassVar[type[TransportParameters]]
    """The model of its parameters."""

    def trainer_end(self, parameters: Any, host: str, folder: Path) -> Any:
        """Make the sending end, a `quartet_trainer.weight_sync.transports.Transport`.

        Args:
            parameters: an instance of `parameters`.
            host: where rollouts reach this trainer, as `trainer.weights.store_host` says; listen nowhere else.
            folder: a folder of this run's alone, not made yet.
        """
        ...

    def rollout_end(self, info: Any) -> Any:
        """Join an epoch (a `quartet_rollout.engines.base.WeightGroupInfo`) as the receiving end, a
        `quartet_rollout.weight_sync.transports.Transport`. May block until `info.timeout_seconds`."""
        ...


def plugin_names() -> list[str]:
    """Names of the transports that installed packages bring."""
    return sorted(entry_points(group=ENTRY_POINT_GROUP).names)


def transport_names() -> list[str]:
    """Names of all transports, those of installed packages included, whether or not they can work here."""
    return [*OWN_TRANSPORTS, *plugin_names()]


def is_reserved(name: str) -> bool:
    """Whether a transport of another package cannot have this name."""
    return name in _TAKEN


def how_to_install(name: str) -> str:
    """What to do at a rollout that lacks the transport of another package, in words."""
    return (
        f"install the package with the entry point '{name}' of {ENTRY_POINT_GROUP} into that rollout's environment and "
        "start it again, or choose another trainer.weights.transport"
    )


def load_transports() -> dict[str, TransportPlugin]:
    """Return the transports of all installed packages, by name.

    Raises:
        ConfigError: one cannot be loaded, is no transport, or has a name that is taken or not its entry point's.
    """
    points = entry_points(group=ENTRY_POINT_GROUP)
    plugins = load_plugins("transport", ENTRY_POINT_GROUP, (), _PARTS, TransportParameters, points)
    for name, plugin in plugins.items():
        at = f"entry point {type(plugin).__module__}:{type(plugin).__qualname__}"
        if is_reserved(name):
            raise ConfigError(f"{at}: its transport's name '{name}' is taken; choose another")
        if name not in points.names:
            raise ConfigError(f"{at}: its transport's name is '{name}', its entry point's is not; give both one name")
    return plugins


def read_parameters(plugin: TransportPlugin, values: dict[str, Any]) -> TransportParameters:
    """Check a transport's parameters. Raises ConfigError, which names the first that is wrong."""
    try:
        return plugin.parameters.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"trainer.weights.transport_parameters.{key}: got {first['input']!r}; {first['msg']}"
        ) from error
