"""Checks before the rollout starts, and with --dry-run: engine, environments, model, and the data against the model, if
both are on this host. Imports no torch.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from quartet_common.config import ConfigError, LoadedConfig, split_address
from quartet_common.disk import warn_of_little_shared_memory
from quartet_common.log import get_logger
from quartet_common.model_folder import check_same_vocabulary, read_model_folder
from quartet_common.ports import interface_address
from quartet_common.run_file import Problems
from quartet_common.run_spec import environment_spec
from quartet_common.sampling import FIRST_RELEASE, Effect, SamplingSection, altered
from quartet_common.sections import EnvironmentSection
from quartet_common.tokenizer_overrides import TOKENIZER_FILES
from quartet_rollout.callbacks import load_callbacks
from quartet_rollout.config import OWN_ENGINES, RolloutSection
from quartet_rollout.engines.base import EngineError
from quartet_rollout.engines.model_folder import context_length
from quartet_rollout.environments import load_environments
from quartet_rollout.environments.registry import UnknownEnvironment, read_environment
from quartet_rollout.generation import TAKEN_BY, PromptRefused
from quartet_rollout.prompt_check import check_prompts, warn_of_missing_special_token
from quartet_server.data_rows import sections_of_rows
from quartet_server.transports import load_transports

log = get_logger(__name__)


def preflight(config: LoadedConfig[RolloutSection]) -> dict[str, Any]:
    """Check the configuration. Raises ConfigError with all problems. Returns a summary of what would run."""
    section = config.section
    with Problems() as problems:
        with problems.collecting():
            _check_engine(section)
        with problems.collecting():
            if section.weight_interface:
                interface_address("rollout.weight_interface", section.weight_interface)
        with problems.collecting():
            load_transports()  # the rollout offers them all, so all must load
        with problems.collecting():
            environments = load_environments(config.run, section.environments)
            for field, environment in _environments(config):
                if environment.served:
                    continue  # the environment service's own check
                with problems.collecting(UnknownEnvironment, PromptRefused):
                    read_environment(environments, environment_spec(environment), field)
        with problems.collecting():
            load_callbacks(section.callbacks)
        problems.add(*_not_taken(config))
        with problems.collecting():
            _check_endpoint(config)
        with problems.collecting():
            _check_teachers(config)
        with problems.collecting():
            _check_model(config)
            warn_of_missing_special_token(config)
    off = {engine: f'rollout.engine = "{engine}"' for engine in OWN_ENGINES if engine != section.engine}
    off |= {} if section.http.address else {"http": "rollout.http.address"}
    for table, cure in off.items():
        if unused := [key for key in config.file.section("rollout").get(table, {}) if key != "address"]:
            log.warning(f"[rollout.{table}] {', '.join(unused)}: without effect; set {cure}, or leave the section out")
    if section.engine == "vllm":
        warn_of_little_shared_memory()
    return {
        "engine": section.engine,
        "environments": list(environments),
        "model": str(config.model.path),
        "broker": config.addresses.broker,
        "reward": config.addresses.reward,
        "threads": section.engine_options.threads,
    }


def _check_engine(section: RolloutSection) -> None:
    # Our own engines have the names of their libraries.
    if section.engine in OWN_ENGINES and importlib.util.find_spec(section.engine) is None:
        raise ConfigError(f"rollout.engine: the package {section.engine} is not installed here")
    if section.max_unsettled_completions < section.max_running_completions:
        raise ConfigError(
            f"rollout.max_unsettled_completions: got {section.max_unsettled_completions}; it must be at least "
            f"rollout.max_running_completions ({section.max_running_completions})"
        )


def _check_endpoint(config: LoadedConfig[RolloutSection]) -> None:
    """Check [rollout.http], and that a run whose environment is served has it."""
    http, environment = config.section.http, config.run.environment
    called = not http.keys_file or any(each.served for _, each in _environments(config))
    if http.address and called and not http.url and split_address(http.address)[0] in ("0.0.0.0", "::"):
        raise ConfigError(
            f"rollout.http.url: got none, and agents cannot call {http.address}; set the URL at which they reach this "
            "host, http://host:port"
        )
    if (
        environment is not None
        and environment.served
        and not environment.add_verifiers
        and "verifiers" in config.run.model_fields_set
    ):
        raise ConfigError(
            "run.verifiers: got some beside a served environment, whose rewards are the only ones; leave the key out, "
            "or set run.environment.add_verifiers"
        )
    if not http.address:
        if environment is not None and environment.served and not config.section.standalone:
            raise ConfigError(
                "rollout.http.address: got none; a served environment plays against the model endpoint: set host:port"
            )
        return
    config.security.check_listening("rollout.http", split_address(http.address)[0])
    http.api_keys()


def _check_teachers(config: LoadedConfig[RolloutSection]) -> None:
    """Check [run.teachers]: that each has an address, and the model's vocabulary if its folder is here."""
    if config.section.standalone:
        return
    with Problems() as problems:
        for name, teacher in config.run.teachers.items():
            key = f"run.teachers.{name}"
            if not teacher.address:
                problems.add(
                    f"{key}.address: got none; `quartet run` serves the teacher and sets it; a rollout that is started "
                    "by hand needs host:port of a rollout service with rollout.standalone = true"
                )
            with problems.collecting():
                if config.model.path is not None and teacher.model is not None and teacher.model.is_dir():
                    check_same_vocabulary(config.model.path, teacher.model, f"{key}.model")


def _not_taken(config: LoadedConfig[RolloutSection]) -> Iterator[str]:
    """Yield the sampling parameters that the engine lacks, as far as that is known before it starts."""
    if config.section.engine != "transformers":  # vllm takes all, another package's says so when it is made
        return
    run, data = config.run, config.data
    trained = [
        ("run.sampling", run.sampling),
        *sections_of_rows({"train": data.get("train")}, "sampling", SamplingSection),
    ]
    evaluated = [("run.evaluation_sampling", run.evaluation_sampling)] if run.evaluation_sampling else []
    evaluated += sections_of_rows({**data, "train": None}, "sampling", SamplingSection)
    rows: set[str] = set()  # names, each reported for the first row that has it
    for key, sampling in (*trained, *evaluated):
        # Those that no engine may take in training, the trainer's check refuses.
        refused = altered(sampling, Effect.CHANGES) if (key, sampling) in trained else {}
        for name, value in altered(sampling).items():
            if name not in FIRST_RELEASE and name not in rows and name not in refused:
                rows |= set() if key.startswith("run.") else {name}
                yield f"{key}.{name}: got {value}; the engine 'transformers' does not take it; {TAKEN_BY}"


def _check_model(config: LoadedConfig[RolloutSection]) -> None:
    """Check the model's folder, and the data against it."""
    section, folder = config.section, config.model.path
    model = read_model_folder(folder, safetensors=False, weights=config.weights)
    assert folder is not None, "read_model_folder refuses it"
    with Problems() as problems:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            problems.add(
                f"model.path: '{folder}' has no tokenizer; allowed: a folder with one of its files, such as "
                "tokenizer.json"
            )
        with problems.collecting(EngineError):
            _check_heads(section, model)
        with problems.collecting(EngineError):
            context = section.engine_options.max_model_len
            if section.engine in OWN_ENGINES:
                key, bounded = f"rollout.{section.engine}.max_model_len", _within_positions(section, model)
                context = context_length(str(folder), key, context, bounded)
            if not section.standalone:
                check_prompts(config, context)


def _check_heads(section: RolloutSection, model: dict[str, Any]) -> None:
    """Raise EngineError if vLLM's workers cannot share the model's attention heads equally."""
    workers, heads = section.vllm.tensor_parallel_size, (model.get("text_config") or model).get("num_attention_heads")
    if section.engine == "vllm" and isinstance(heads, int) and heads % workers:
        allowed = f"a divisor of the model's num_attention_heads, {heads}"
        raise EngineError(f"rollout.vllm.tensor_parallel_size: got {workers}; allowed: {allowed}")


def _within_positions(section: RolloutSection, model: dict[str, Any]) -> bool:
    """Whether the engine does not go beyond the model's positions; vLLM multiplies them by some factors of rotary
    embeddings, and can be told another limit."""
    text = model.get("text_config") or model
    scaled = "'factor'" in repr(text.get("rope_parameters") or text.get("rope_scaling")) or "model_max_length" in model
    told = any(key.startswith("hf_") for key in section.vllm.model_extra or ())
    told = told or bool(os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"))
    return section.engine == "transformers" or not (scaled or told)


def _environments(config: LoadedConfig[RolloutSection]) -> Iterator[tuple[str, EnvironmentSection]]:
    """Yield the run's environment and each distinct one in rows of the data, with the place that names it."""
    if config.run.environment is not None:
        yield "run.environment", config.run.environment
    yield from sections_of_rows(config.data, "environment", EnvironmentSection)
