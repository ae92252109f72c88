"""The checks before the environment service starts, which --dry-run runs alone."""

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from quartet_common.config import EnvironmentSection, LoadedConfig
from quartet_common.python_file import install_command
from quartet_common.run_file import Problems
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.environments import describe, named_environments, task_sources
from quartet_environment.function import ENTRY_POINT_GROUP, lacking
from quartet_server.data_rows import sections_of_rows


def preflight(config: LoadedConfig[EnvironmentServiceSection]) -> dict[str, Any]:
    """Load the environments, and check the parameters of the run's and of its data's.

    Raises ConfigError with all problems. Returns what would run.
    """
    section, named = config.section, named_environments(config)
    lacked = {point.name: lacking(point) for point in entry_points(group=ENTRY_POINT_GROUP)}
    checked: set[str] = set()
    with Problems() as problems:
        for name, field, table, parameters in _used(config):
            if packages := lacked.get(name):
                problems.add(f"{field}: '{name}' needs a package: {install_command(*packages)}")
            elif name not in named:
                problems.add(f"{field.removesuffix('.file')}: no environment '{name}' is served; {_served(named)}")
            elif name not in checked or parameters:
                checked.add(name)
                with problems.collecting():
                    describe(name, field, section, parameters, table)
        for name in named.keys() - checked:
            with problems.collecting():
                describe(name, named[name], section)
    return {"environments": sorted(named), "workers": section.workers}


def _used(config: LoadedConfig[EnvironmentServiceSection]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yield the environments of the run and of its data: name, the key that names it, its table, its parameters."""
    sections = list(sections_of_rows(config.data, "environment", EnvironmentSection))
    if config.run.environment is not None:
        sections = [("run.environment", config.run.environment), *sections]
    for where, one in sections:
        if one.served:
            yield one.spec_name, f"{where}.file" if one.file else where, where, one.parameters
    for key, source in task_sources(config.data):
        yield str(source["environment"]), f"{key}.environment", key, source.get("parameters") or {}


def _served(named: dict[str, str]) -> str:
    return f"allowed: {', '.join(sorted(named)) or 'none'}; add a file to environment.files"
