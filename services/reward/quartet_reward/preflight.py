"""The checks before the reward service starts, which --dry-run runs alone."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from quartet_common.config import LoadedConfig
from quartet_common.errors import ContractError
from quartet_common.log import get_logger
from quartet_common.run_file import Problems
from quartet_common.sections import VerifierSection
from quartet_reward.config import RewardSection, check_reward_model
from quartet_reward.reference_check import check_references
from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.sandbox.pool import check_sandbox
from quartet_reward.verifiers.function import RewardFunction
from quartet_reward.verifiers.registry import SpecReader, load_verifiers
from quartet_server.data_rows import data_rows, sections_of_rows

log = get_logger(__name__)


def preflight(config: LoadedConfig[RewardSection]) -> dict[str, Any]:
    """Check the verifiers of the run and of its data, their parameters, and what they need; in a dry run also the
    references of the data.

    Raises ConfigError with all problems. Returns what would run.
    """
    run, section = config.run, config.section
    named = [(f"run.verifiers[{i}]", one) for i, one in enumerate(run.verifiers)]
    sandbox = None
    with Problems() as problems:
        if find_spec("math_verify") is None:
            problems.add("the package math-verify is not installed in the reward service's environment")
        with problems.collecting():
            functions = load_functions(config)
            verifiers = load_verifiers(functions)
            specs = SpecReader(verifiers)
            named += sections_of_rows(config.data, "verifiers", VerifierSection)
            problems.add(*_refused(specs, named))
            if config.dry_run:
                errors, warnings = check_references(config, specs)
                problems.add(*errors, *_without_columns(config, functions))
                for warning in warnings:
                    log.warning("%s", warning)
        for where, one in named:
            if one.name == "reward_model" and section.reward_model.path is None:
                problems.add(
                    f"reward.reward_model.path is missing: {where} is 'reward_model', whose Hugging Face folder it "
                    "must name"
                )
        with problems.collecting():
            check_reward_model(section.reward_model)
        if section.sandbox.required or any(one.name == "code" for _, one in named):
            with problems.collecting(SandboxUnavailable):
                sandbox = asyncio.run(check_sandbox(section.sandbox))
    plan = {"verifiers": list(verifiers), "workers": section.workers}
    return {**plan, "sandbox": sandbox} if sandbox is not None else plan


_KEPT_BACK = {
    "test_cases",
    "test_program",
    "entry_point",
    "id",
    "metadata",
    "verifiers",
    "sampling",
    "environment",
    "columns",
}
"""Fields of a row that reward functions are not given."""


def _without_columns(config: LoadedConfig[RewardSection], functions: Sequence[RewardFunction]) -> Iterator[str]:
    """Yield the functions of the run that require what no row has; warn if some rows lack it."""
    rows = [(where, _names(row)) for where, row in data_rows(config.data) if not row.get("verifiers")]
    required = {function.name: function.required for function in functions}
    for i, one in enumerate(config.run.verifiers):
        for name in set(required.get(one.spec_name, ())) - one.parameters.keys():
            lacking = [where for where, names in rows if name not in names]
            what = f"run.verifiers[{i}]: '{one.spec_name}' requires '{name}', which"
            cure = "add the column, map it in `fields`, or give the argument a default or a parameter"
            if lacking and len(lacking) == len(rows):
                yield f"{what} no row has; {lacking[0]} has {', '.join(sorted(rows[0][1])) or 'no column'}; {cure}"
            elif lacking:
                log.warning(f"{what} {len(lacking)} of {len(rows)} rows lack, the first of them {lacking[0]}; {cure}")


def _names(row: Mapping[str, Any]) -> set[str]:
    """Return the names under which a function is given what a row has."""
    columns = row.get("columns")
    given = dict(row) | (columns if isinstance(columns, dict) else {}) | ({"answer": 1} if row.get("gt_answer") else {})
    return {name for name, value in given.items() if value is not None} - _KEPT_BACK


def load_functions(config: LoadedConfig[RewardSection]) -> list[RewardFunction]:
    """Return the reward functions that the run's verifiers and `reward.functions` name.

    Raises:
        ConfigError: which files or functions cannot be used, and why.
    """
    named = {one.file: f"run.verifiers[{i}].file" for i, one in enumerate(config.run.verifiers) if one.file}
    named |= {path: f"reward.functions[{i}]" for i, path in enumerate(config.section.functions)}
    functions = []
    with Problems() as problems:
        for path, field in named.items():
            with problems.collecting():
                functions.append(RewardFunction(path, field, config.section))
    return functions


def _refused(specs: SpecReader, named: Iterable[tuple[str, VerifierSection]]) -> Iterator[str]:
    for where, one in named:
        try:
            specs.bind(one.spec_name, one.weight, one.parameters, where)
        except ContractError as error:
            yield error.message
