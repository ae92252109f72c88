"""The checks before the environment service starts, which --dry-run runs alone."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from quartet_common.config import LoadedConfig
from quartet_common.python_file import install_command
from quartet_common.run_file import Problems
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.environments import describe, installed, named_environments, used_environments
from quartet_environment.function import ENTRY_POINT_GROUP, lacking


def preflight(config: LoadedConfig[EnvironmentServiceSection]) -> dict[str, Any]:
    """Load the environments, and check the parameters of the run's and of its data's.

    Raises ConfigError with all problems. Returns what would run.
    """
    section, named = config.section, named_environments(config)
    lacked = {point.name: lacking(point) for point in entry_points(group=ENTRY_POINT_GROUP)}
    fields, given = dict(named), dict[str, dict[str, Mapping[str, Any]]]()
    used = list(used_environments(config))
    for name, field, table, parameters in used:
        if name in named:
            if name not in given:
                fields[name] = field
            given.setdefault(name, {}).update({table: parameters} if parameters else {})
    with Problems() as problems:
        for name, field in fields.items():
            with problems.collecting():
                describe(name, field, section, given.get(name))
        for name, field, *_ in used:
            if packages := lacked.get(name):
                problems.add(f"{field}: '{name}' needs a package: {install_command(*packages)}")
            elif name not in named:
                problems.add(f"{field.removesuffix('.file')}: no environment '{name}' is served; {_allowed(named)}")
    return {"environments": sorted(named), "workers": section.workers}


def _allowed(named: dict[str, str]) -> str:
    names = {point.name for point in installed()} | named.keys()
    return f"allowed: {', '.join(sorted(names)) or 'none'}; add a file to environment.files"
