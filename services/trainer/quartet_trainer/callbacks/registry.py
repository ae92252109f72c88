"""Which callbacks there are: `wandb`, and those of the entry points in the group `quartet.callbacks`."""

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import Any

from pydantic import Field, ValidationError

from quartet_common.config import ConfigError, Section
from quartet_common.plugins import install_command, load_plugins
from quartet_trainer.callbacks.base import Parameters, Starter
from quartet_trainer.callbacks.weights_and_biases import WandbStarter

ENTRY_POINT_GROUP = "quartet.callbacks"
_PARTS = ("name", "description", "parameters", "start")


class CallbackSection(Section):
    """One of [[trainer.callbacks]]."""

    name: str = Field(min_length=1, description="`wandb`, or a callback that an installed package brings.")
    parameters: dict[str, Any] = Field({}, description="Its parameters.")


def load_callbacks(points: Iterable[EntryPoint] | None = None) -> dict[str, Starter]:
    """Return all callbacks by name, in alphabetical order.

    Args:
        points: the entry points to load; by default those of the installed packages.

    Raises:
        ConfigError: an entry point cannot be loaded, is no callback, or takes a name that is taken.
    """
    return load_plugins("callback", ENTRY_POINT_GROUP, (WandbStarter(),), _PARTS, Parameters, points)


def check_callbacks(sections: Sequence[CallbackSection]) -> list[tuple[Starter, Parameters]]:
    """Return what `sections` name, with its parameters, in their order.

    Raises:
        ConfigError: there is no such callback, a package that it needs is not installed, or it does not take these
            parameters.
    """
    if not sections:
        return []
    known = load_callbacks()
    found = []
    for index, section in enumerate(sections):
        where = f"trainer.callbacks[{index}]"
        if section.name not in known:
            raise ConfigError(f"{where}.name: there is no callback '{section.name}'; there are: {', '.join(known)}")
        starter = known[section.name]
        if missing := [package for package in getattr(starter, "needs", ()) if find_spec(package) is None]:
            raise ConfigError(
                f"{where}: callback '{section.name}' needs {', '.join(missing)}, not installed here; install it: "
                f"{install_command(*missing)}"
            )
        try:
            found.append((starter, starter.parameters(**section.parameters)))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{where}.parameters of '{section.name}': {at}: {first['msg']}") from error
    return found
