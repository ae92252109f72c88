"""Plug-ins: a service's own and those that other packages provide by entry points; and how a package is installed."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quartet_common.config import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def install_command(*packages: str) -> str:
    """Return the shell command that installs packages into this process's environment, for error messages.

    In an environment of a checkout it is `quartet env add`, which keeps them there when the environment is recreated.
    """
    environment, names = Path(sys.prefix), " ".join(packages)
    if (environment / "quartet-stamp.json").exists():
        return f"quartet env add {environment.name} {names}"
    if find_spec("pip"):
        return f"{sys.executable} -m pip install {names}"
    return f"uv pip install --python {sys.executable} {names}"


def read_parameters(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """Validate a plug-in's parameters. Raises ConfigError naming the first invalid one; `where`: their key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([where, *(str(part) for part in first["loc"])])
        raise ConfigError(f"{key}: got {first['input']!r}; {first['msg']}") from error


def load_plugins(
    kind: str,
    group: str,
    built_in: Iterable[Any],
    parts: Sequence[str],
    parameters: type,
    points: Iterable[EntryPoint] | None = None,
) -> dict[str, Any]:
    """Return plug-ins by name, in alphabetical order.

    Args:
        kind: what they are, for errors, e.g. "verifier".
        group: the group of entry points.
        built_in: instances of the service's own; each has a `name`.
        parts: attributes that each must have, `name` and `parameters` among them.
        parameters: the class that the attribute `parameters` of each must be a subclass of.
        points: the entry points to load; by default those of the installed packages.

    Raises:
        ConfigError: an entry point cannot be loaded, is no such plug-in, or has a name that is taken.
    """
    found = {one.name: one for one in built_in}
    for point in entry_points(group=group) if points is None else points:
        plugin = _load(kind, point, parts, parameters)
        if plugin.name in found:
            raise ConfigError(f"entry point {point.value}: its {kind}'s name '{plugin.name}' is taken; choose another")
        found[plugin.name] = plugin
    return dict(sorted(found.items()))


def _load(kind: str, point: EntryPoint, parts: Sequence[str], parameters: type) -> Any:
    try:
        plugin = point.load()()
    except Exception as error:  # any module may be named here
        raise ConfigError(f"entry point {point.value}: cannot be loaded: {type(error).__name__}: {error}") from error
    lacking = [part for part in parts if not hasattr(plugin, part)]
    if lacking:
        raise ConfigError(f"entry point {point.value}: no {kind}: it lacks {', '.join(lacking)}")
    if not (isinstance(plugin.parameters, type) and issubclass(plugin.parameters, parameters)):
        where = f"{parameters.__module__}.{parameters.__qualname__}"
        raise ConfigError(f"entry point {point.value}: 'parameters' must be a subclass of {where}")
    return plugin
