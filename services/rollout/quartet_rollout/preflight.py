"""What the rollout checks before it starts, and with --dry-run alone. Imports neither torch nor an engine."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from quartet_common.config import ConfigError, EnvironmentSection, LoadedConfig
from quartet_common.data_rows import data_rows
from quartet_common.model_folder import read_model_folder
from quartet_common.run_file import Problems
from quartet_common.run_spec import environment_spec
from quartet_common.transports import load_transports
from quartet_rollout.chat_templates import check_chats
from quartet_rollout.config import OWN_ENGINES, RolloutSection
from quartet_rollout.engines.base import EngineError
from quartet_rollout.engines.model_folder import context_length
from quartet_rollout.environments import load_environments
from quartet_rollout.environments.chosen import UnknownEnvironment, read_environment
from quartet_rollout.prompt_lengths import check_prompt_lengths
from quartet_rollout.sampling import PromptRefused

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def preflight(config: LoadedConfig[RolloutSection]) -> dict[str, Any]:
    """Check what the configuration names. Raises ConfigError with all that is wrong. Returns what would run."""
    section = config.section
    with Problems() as problems:
        with problems.collecting():
            _check_engine(section)
        with problems.collecting():
            load_transports()  # each is offered, so each must work
        with problems.collecting():
            environments = load_environments()
            for field, environment in _environments(config):
                with problems.collecting(UnknownEnvironment, PromptRefused):
                    read_environment(environments, environment_spec(environment), field)
        with problems.collecting():
            _check_model(config)
    return {
        "engine": section.engine,
        "environments": list(environments),
        "model": str(config.model.path),
        "broker": config.addresses.broker,
        "reward": config.addresses.reward,
        "threads": section.engine_options.threads,
    }


def _check_engine(section: RolloutSection) -> None:
    # Each of our own engines is called as its library is.
    if section.engine in OWN_ENGINES and importlib.util.find_spec(section.engine) is None:
        raise ConfigError(f"rollout.engine: the package {section.engine} is not installed here")
    if section.max_unsettled_completions < section.max_running_completions:
        raise ConfigError(
            f"rollout.max_unsettled_completions: got {section.max_unsettled_completions}; it must be at least "
            f"rollout.max_running_completions ({section.max_running_completions})"
        )


def _check_model(config: LoadedConfig[RolloutSection]) -> None:
    """Check the model's folder, and the data against it."""
    section, folder = config.section, config.model.path
    read_model_folder(folder, safetensors=False)
    assert folder is not None, "read_model_folder refuses it"
    with Problems() as problems:
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            problems.add(
                f"model.path: '{folder}' has no tokenizer; allowed: a folder with one of its files, such as "
                "tokenizer.json"
            )
        with problems.collecting(EngineError):
            context = section.engine_options.max_model_len
            if section.engine in OWN_ENGINES:
                context = context_length(str(folder), f"rollout.{section.engine}.max_model_len", context)
            check_prompt_lengths(config, context)
        with problems.collecting():
            check_chats(folder, config.data, config.run.system_prompt)


def _environments(config: LoadedConfig[RolloutSection]) -> Iterator[tuple[str, EnvironmentSection]]:
    """Yield the run's environment, and those that rows of the data name for themselves, where they are named first."""
    if config.run.environment is not None:
        yield "run.environment", config.run.environment
    seen = set()
    for where, row in data_rows(config.data, "environment"):
        value = row["environment"]
        if repr(value) in seen:
            continue
        seen.add(repr(value))
        try:
            section = EnvironmentSection.model_validate({"name": value} if isinstance(value, str) else value)
        except ValidationError:
            continue  # the client refuses it
        yield f"{where}: environment", section
