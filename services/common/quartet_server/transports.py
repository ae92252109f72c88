"""Weight transports of other packages, by entry points of the group `quartet.transports`.

One entry point provides both ends, so the package is installed at trainer and rollout. docs/extend.md has an example.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from quartet_common.config import ConfigError
from quartet_server.plugins import load_plugins

ENTRY_POINT_GROUP = "quartet.transports"
OWN_TRANSPORTS = ("gloo", "nccl", "file")
# The capability of a transport is weights.NAME; these names have another meaning there.
RESERVED_NAMES = (*OWN_TRANSPORTS, "full", "lora", "in_flight", "store_gate")
_PARTS = ("name", "description", "parameters", "trainer_end", "rollout_end")


class TransportParameters(BaseModel):
    """Parameters of a transport, `[trainer.weights.transport_parameters]`. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TransportPlugin(Protocol):
    """The class that an entry point names, constructed without arguments. Its module is imported when a service starts,
    so it should import torch only within `trainer_end` and `rollout_end`."""

    name: ClassVar[str]
    """The entry point's name, and the value of `trainer.weights.transport`."""
    description: ClassVar[str]
    """One sentence."""
    parameters: ClassVar[type[TransportParameters]]
    """The model of its parameters."""

    def trainer_end(self, parameters: Any, host: str, folder: Path) -> Any:
        """Make the sending end, a `quartet_trainer.weight_sync.transports.Transport`.

        Args:
            parameters: an instance of `parameters`.
            host: where rollouts reach this trainer (`trainer.weights.store_host`); listen only there.
            folder: a folder for this run only, not created yet.
        """
        ...

    def rollout_end(self, info: Any) -> Any:
        """Make the receiving end, a `quartet_rollout.weight_sync.receiver.Transport`, for an epoch (`info` is a
        `quartet_rollout.engines.base.WeightGroupInfo`). It must not wait for the trainer's `send`, which comes after
        all rollouts' ends are made."""
        ...


def transport_names() -> list[str]:
    """Return the names of all transports, those of installed packages included, whether or not they work here."""
    return [*OWN_TRANSPORTS, *sorted(entry_points(group=ENTRY_POINT_GROUP).names)]


def how_to_install(name: str) -> str:
    """Return what to do at a rollout that lacks a transport, to end a message with; "" for our own."""
    if name in OWN_TRANSPORTS:
        return ""
    return (
        f"; install the package with the entry point '{name}' of {ENTRY_POINT_GROUP} into that rollout's environment "
        "and start it again, or choose another trainer.weights.transport"
    )


def load_transports() -> dict[str, TransportPlugin]:
    """Return the transports of all installed packages, by name.

    Raises:
        ConfigError: one cannot be loaded, is no transport, or its name is taken or differs from its entry point's.
    """
    points = entry_points(group=ENTRY_POINT_GROUP)
    plugins = load_plugins("transport", ENTRY_POINT_GROUP, (), _PARTS, TransportParameters, points)
    for name, plugin in plugins.items():
        at = f"entry point {type(plugin).__module__}:{type(plugin).__qualname__}"
        if name in RESERVED_NAMES:
            raise ConfigError(f"{at}: its transport's name '{name}' is taken; choose another")
        if name not in points.names:
            raise ConfigError(f"{at}: its transport's name is '{name}', its entry point's is not; give both one name")
    return plugins
