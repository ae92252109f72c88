"""The checks before the environment service starts, which --dry-run runs alone."""

from typing import Any

from quartet_common.config import EnvironmentSection, LoadedConfig
from quartet_common.run_file import Problems
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.environments import describe, named_environments
from quartet_server.data_rows import sections_of_rows


def preflight(config: LoadedConfig[EnvironmentServiceSection]) -> dict[str, Any]:
    """Load the environments, and check the parameters of the run's and of its data's.

    Raises ConfigError with all problems. Returns what would run.
    """
    section, named = config.section, named_environments(config)
    used = list(sections_of_rows(config.data, "environment", EnvironmentSection))
    if config.run.environment is not None:
        used = [("run.environment", config.run.environment), *used]
    checked: set[str] = set()
    with Problems() as problems:
        for where, one in used:
            if not one.served:
                continue
            if one.spec_name not in named:
                problems.add(f"{where}: no environment '{one.spec_name}' is served; {_served(named)}")
            elif one.spec_name not in checked or one.parameters:
                checked.add(one.spec_name)
                with problems.collecting():
                    describe(one.spec_name, f"{where}.file" if one.file else where, section, one.parameters)
        for name in named.keys() - checked:
            with problems.collecting():
                describe(name, named[name], section)
    return {"environments": sorted(named), "workers": section.workers}


def _served(named: dict[str, str]) -> str:
    return f"allowed: {', '.join(sorted(named)) or 'none'}; add a file to environment.files"
