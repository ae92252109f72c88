"""Which environments there are: this package's own and those of the entry points `quartet.environments`."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

from quartet_common.plugins import load_plugins
from quartet_rollout.environments.base import Environment, Parameters
from quartet_rollout.environments.python_tool import PythonTool
from quartet_rollout.environments.single_turn import SingleTurn

ENTRY_POINT_GROUP = "quartet.environments"

# Any: to a type checker each has parameters of another class than the Protocol's.
_BUILT_IN: tuple[Any, ...] = (PythonTool, SingleTurn)
_PARTS = ("name", "description", "parameters", "stop", "begin")


def load_environments(points: Iterable[EntryPoint] | None = None) -> dict[str, Environment]:
    """Return all environments by name, in alphabetical order.

    Args:
        points: the entry points to load; by default those of the installed packages.

    Raises:
        ConfigError: an entry point cannot be loaded, is no environment, or takes a name that is taken.
    """
    own = [one() for one in _BUILT_IN]
    return load_plugins("environment", ENTRY_POINT_GROUP, own, _PARTS, Parameters, points)
