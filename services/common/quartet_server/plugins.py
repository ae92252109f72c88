"""Plug-ins: a service's own, those that other packages provide by entry points, and those in Python files."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quartet_common.config import ConfigError
from quartet_common.python_file import FileError, describe, load_callable

Model = TypeVar("Model", bound=BaseModel)


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


def load_in_file(kind: str, path: str, key: str, parts: Sequence[str], parameters: type) -> Any:
    """Return the plug-in that a class of a Python file, `FILE.py:CLASS`, makes; `path` is its name.

    Its description and parameters may be left out. Raises ConfigError with the run file's `key` of it.
    """
    try:
        plugin = load_callable(path)()
        plugin.name, plugin.description = path, getattr(plugin, "description", inspect.getdoc(plugin) or "")
        plugin.parameters = getattr(plugin, "parameters", parameters)
    except FileError as error:
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:  # it is the user's program
        what = describe(error, path.rpartition(":")[0])
        raise ConfigError(f"{key}: '{path}' {what['reason']} ({what['place']})") from error
    return _checked(kind, f"{key}: '{path}'", plugin, parts, parameters)


def _load(kind: str, point: EntryPoint, parts: Sequence[str], parameters: type) -> Any:
    try:
        plugin = point.load()()
    except Exception as error:  # any module may be named here
        raise ConfigError(f"entry point {point.value}: cannot be loaded: {type(error).__name__}: {error}") from error
    return _checked(kind, f"entry point {point.value}", plugin, parts, parameters)


def _checked(kind: str, source: str, plugin: Any, parts: Sequence[str], parameters: type) -> Any:
    lacking = [part for part in parts if not hasattr(plugin, part)]
    if lacking:
        raise ConfigError(f"{source}: no {kind}: it lacks {', '.join(lacking)}")
    if not (isinstance(plugin.parameters, type) and issubclass(plugin.parameters, parameters)):
        where = f"{parameters.__module__}.{parameters.__qualname__}"
        raise ConfigError(f"{source}: 'parameters' must be a subclass of {where}")
    return plugin
