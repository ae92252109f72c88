"""Which environments there are: this package's own and those of the entry points `quartet.environments`."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from quartet_common.config import ConfigError
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
    environments: dict[str, Environment] = {one.name: one() for one in _BUILT_IN}
    for point in entry_points(group=ENTRY_POINT_GROUP) if points is None else points:
        environment = _load(point)
        if environment.name in environments:
            raise ConfigError(
                f"entry point {point.value}: its environment's name '{environment.name}' is taken; choose another"
            )
        environments[environment.name] = environment
    return dict(sorted(environments.items()))


def _load(point: EntryPoint) -> Environment:
    try:
        environment = point.load()()
    except Exception as error:  # any module may be named here
        raise ConfigError(f"entry point {point.value}: cannot be loaded: {type(error).__name__}: {error}") from error
    lacking = [part for part in _PARTS if not hasattr(environment, part)]
    if lacking:
        raise ConfigError(f"entry point {point.value}: no environment: it lacks {', '.join(lacking)}")
    if not (isinstance(environment.parameters, type) and issubclass(environment.parameters, Parameters)):
        raise ConfigError(
            f"entry point {point.value}: 'parameters' must be a subclass of quartet_rollout.environments.Parameters"
        )
    return environment
