"""The environments of the service by name: functions of Python files, and those that packages register."""

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from quartet_common.config import ConfigError, LoadedConfig
from quartet_common.python_file import in_a_file
from quartet_common.run_file import Problems
from quartet_common.sections import EnvironmentSection
from quartet_common.sources import task_sources
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.function import ENTRY_POINT_GROUP, lacking
from quartet_environment.pool import EpisodePool
from quartet_server.data_rows import sections_of_rows
from quartet_server.worker_process import WorkerCommand, describe_function

_MODULE = "quartet_environment.player"


@dataclass(frozen=True)
class Environment:
    """An environment, whose function only worker processes load."""

    name: str
    description: str
    schema: dict[str, Any] | None
    """JSON Schema of its parameters; None: it takes none."""
    has_tasks: bool
    command: WorkerCommand
    """What starts a worker process of it."""
    pool: EpisodePool


def named_environments(config: LoadedConfig[EnvironmentServiceSection]) -> dict[str, str]:
    """Return the names of the environments, each with the key of the run file, or the entry point, that names it.

    Where the run file names environments, those of packages are left out that it does not name: some take a core for
    half a minute to be imported.
    """
    names = {point.name: f"entry point {point.value}" for point in installed()}
    if names and (used := {name for name, *_ in used_environments(config)}):
        names = {name: point for name, point in names.items() if name in used}
    run = config.run.environment
    if run is not None and run.file and run.served:
        names[run.file] = "run.environment.file"
    for key, source in task_sources(config.data):
        if in_a_file(name := str(source["environment"])):
            names.setdefault(name, f"{key}.environment")
    return names | {path: f"environment.files[{i}]" for i, path in enumerate(config.section.files)}


def installed() -> list[EntryPoint]:
    """Return the entry points of packages' environments, without those that lack a package."""
    return [point for point in entry_points(group=ENTRY_POINT_GROUP) if not lacking(point)]


def used_environments(
    config: LoadedConfig[EnvironmentServiceSection],
) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yield the environments of the run and of its data: name, the key that names it, its table, its parameters."""
    sections = list(sections_of_rows(config.data, "environment", EnvironmentSection))
    if config.run.environment is not None:
        sections = [("run.environment", config.run.environment), *sections]
    for where, one in sections:
        if one.served:
            yield one.spec_name, f"{where}.file" if one.file else where, where, one.parameters
    for key, source in task_sources(config.data):
        yield str(source["environment"]), f"{key}.environment", key, source.get("parameters") or {}


def load_environments(config: LoadedConfig[EnvironmentServiceSection]) -> dict[str, Environment]:
    """Return all environments by name, in alphabetical order; their processes are not started.

    Raises:
        ConfigError: which files or functions cannot be used, and why.
    """
    named, found = named_environments(config), {}
    with Problems() as problems, ThreadPoolExecutor(4) as threads:
        section = config.section
        described = {name: threads.submit(describe, name, field, section) for name, field in named.items()}
        for name, future in sorted(described.items()):
            with problems.collecting():
                found[name] = _made(name, future.result(), section)
    return found


def _made(name: str, told: Mapping[str, Any], section: EnvironmentServiceSection) -> Environment:
    arguments = (f"--function={name}", f"--hang-seconds={section.hang_seconds}")
    # With the service's environment: an agent may need the API keys of its tools.
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = WorkerCommand(_MODULE, arguments, variables, section.start_seconds, may_wait=True)
    description = told["description"] or "An agent."
    pool = EpisodePool(name, command, section)
    return Environment(name, description, told["schema"], told["has_tasks"], command, pool)


def describe(
    name: str,
    field: str,
    section: EnvironmentServiceSection,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Load an environment in a process of its own; return "description", "schema" and "has_tasks".

    Args:
        field: what names it, for errors.
        parameters: to check, each with the table that has them, for errors. All in one process: a package may take
            many seconds to load.

    Raises:
        ConfigError: it cannot be loaded, is no environment, or refuses parameters.
    """
    limit = f"{section.start_seconds:g} s (environment.start_seconds)"
    told = describe_function(_MODULE, name, field, section.start_seconds, limit, json.dumps(parameters or {}))
    if told["refused"]:
        raise ConfigError(*told["refused"])
    return told
