"""Checks before the rollout starts, and with --dry-run: engine, environments, model, and the data against the model, if
both are on this host. Imports no torch.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.chats import from_json, to_chat, turns_of
from quartet_common.config import ConfigError, EnvironmentSection, LoadedConfig
from quartet_common.data_rows import data_rows, sections_of_rows
from quartet_common.disk import warn_of_little_shared_memory
from quartet_common.hub import TOKENIZER_FILES
from quartet_common.log import get_logger
from quartet_common.model_folder import read_model_folder
from quartet_common.ports import interface_address
from quartet_common.run_file import Problems
from quartet_common.run_spec import environment_spec, run_spec
from quartet_common.sampling import FIRST_RELEASE, altered
from quartet_common.transports import load_transports
from quartet_rollout.config import OWN_ENGINES, RolloutSection
from quartet_rollout.engines.base import EngineError
from quartet_rollout.engines.model_folder import context_length, load_tokenizer
from quartet_rollout.environments import load_environments
from quartet_rollout.environments.registry import UnknownEnvironment, read_environment
from quartet_rollout.generation import TAKEN_BY, PromptRefused, sampling_values
from quartet_rollout.prompts import PromptReader, room_for_prompt

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
                with problems.collecting(UnknownEnvironment, PromptRefused):
                    read_environment(environments, environment_spec(environment), field)
        problems.add(*_not_taken(config))
        with problems.collecting():
            _check_model(config)
            warn_of_missing_special_token(config)
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


def _not_taken(config: LoadedConfig[RolloutSection]) -> Iterator[str]:
    """Yield the sampling parameters that the engine lacks, as far as that is known before it starts."""
    if config.section.engine != "transformers":  # vllm takes all, another package's says so when it is made
        return
    sections = {"run.sampling": config.run.sampling, "run.evaluation_sampling": config.run.evaluation_sampling}
    for key, sampling in sections.items():
        for name, value in altered(sampling).items() if sampling else ():
            if name not in FIRST_RELEASE:
                yield f"{key}.{name}: got {value}; the engine 'transformers' does not take it; {TAKEN_BY}"


def _check_model(config: LoadedConfig[RolloutSection]) -> None:
    """Check the model's folder, and the data against it."""
    section, folder = config.section, config.model.path
    read_model_folder(folder, safetensors=False, weights=config.weights)
    assert folder is not None, "read_model_folder refuses it"
    with Problems() as problems:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            problems.add(
                f"model.path: '{folder}' has no tokenizer; allowed: a folder with one of its files, such as "
                "tokenizer.json"
            )
        with problems.collecting(EngineError):
            context = section.engine_options.max_model_len
            if section.engine in OWN_ENGINES:
                key, bounded = f"rollout.{section.engine}.max_model_len", section.engine == "transformers"
                context = context_length(str(folder), key, context, bounded)
            check_prompts(config, context)


def warn_of_missing_special_token(config: LoadedConfig[RolloutSection]) -> None:
    """Warn of a text prompt that lacks the special token with which the model's texts begin."""
    assert config.model.path is not None, "it was checked"
    tokenizer = config.model.path / "tokenizer.json"
    if config.run.add_special_tokens or not tokenizer.is_file():
        return
    from tokenizers import Tokenizer

    try:
        encoded = Tokenizer.from_file(str(tokenizer)).encode("a")
    except Exception as error:  # the library raises no other
        raise ConfigError(f"model.path: '{tokenizer}' cannot be read: {error}") from error
    if not any(encoded.special_tokens_mask[:1]):
        return
    for where, row in data_rows(config.data, "prompt"):
        if isinstance(row["prompt"], str) and not row["prompt"].startswith(encoded.tokens[0]):
            log.warning(
                "%s: texts of this model begin with '%s', and this prompt will not; set run.add_special_tokens = true",
                where,
                encoded.tokens[0],
            )
            return


def _environments(config: LoadedConfig[RolloutSection]) -> Iterator[tuple[str, EnvironmentSection]]:
    """Yield the run's environment and each distinct one in rows of the data, with the place that names it."""
    if config.run.environment is not None:
        yield "run.environment", config.run.environment
    yield from sections_of_rows(config.data, "environment", EnvironmentSection)


def check_prompts(config: LoadedConfig, max_model_len: int | None) -> None:
    """Read the prompts of [data] as the rollout will, those that may be too long and one chat of each kind.

    The client checks files that are not on this host, and lines that are no prompts.

    Raises:
        ConfigError: with files and lines, a prompt leaves no room for a completion, or the chat template refuses it.
    """
    folder = config.model.path
    assert folder is not None
    context = max_model_len or json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if not (folder / "tokenizer.json").is_file() or not context:
        return
    spec = run_spec(config.run)
    run = config.run
    for key, sampling in (("sampling", run.sampling), ("evaluation_sampling", run.evaluation_sampling)):
        given = sampling and "max_new_tokens" in sampling.model_fields_set
        # Without data the run is another file's, of which this one need not say anything.
        if sampling and (given or (sampling is run.sampling and config.data.get("train"))):
            try:
                room_for_prompt(sampling.max_new_tokens, spec, context)
            except PromptRefused as error:
                raise ConfigError(f"run.{key}.max_new_tokens: got {error.came}; allowed: {error.allowed}") from error
    readers: list[PromptReader] = []
    found: dict[str, str] = {}  # the first problem of each field
    sizes: dict[tuple[object, ...], float] = {}  # tokens per message, of the first chat of each kind
    for where, row in data_rows(config.data):
        prompt = _prompt(row)
        if prompt is None:
            continue
        try:
            wanted = sampling_values(prompt, spec, experience_pb2.PURPOSE_TRAIN).get("max_new_tokens", 0)
            room, _ = room_for_prompt(wanted, spec, context)
            kind, turns = _kind(prompt.chat), len(prompt.chat.messages)
            # There are at most as many tokens as bytes.
            most = len(spec.system_prompt) + prompt.ByteSize() + sizes.get(kind, 0) * (turns + 1)
            if (most <= room or config.run.long_prompts == "truncate_left") and (not turns or kind in sizes):
                continue
            token_ids = _read_prompt(readers, folder, context, prompt, spec)
            sizes.setdefault(kind, token_ids.size / max(turns, 1))
        except PromptRefused as error:
            found.setdefault(error.field, f"{where}: {error}")
    if found:
        raise ConfigError(*found.values())


def _read_prompt(
    readers: list[PromptReader], folder: Path, context: int, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec
) -> np.ndarray:
    """Read a prompt with the first of the readers, made if there is none.

    Importing the tokenizer's own class may take ten seconds, so it only confirms what the general one refuses: it may
    know special tokens that are in no file.
    """
    if not readers:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        readers.append(PromptReader(tokenizer, context))
    try:
        return readers[0].read(prompt, spec, experience_pb2.PURPOSE_TRAIN)[0]
    except PromptRefused:
        if len(readers) == 1:
            readers.append(PromptReader(load_tokenizer(str(folder)), context))
        readers.reverse()
        return readers[0].read(prompt, spec, experience_pb2.PURPOSE_TRAIN)[0]


def _prompt(row: dict[str, Any]) -> experience_pb2.Prompt | None:
    """Return the text or chat of a row; None if it has neither, or another input."""
    try:
        sampling = {key: value for key, value in (row.get("sampling") or {}).items() if value is not None}
        prompt = experience_pb2.Prompt(sampling=experience_pb2.SamplingParams(**sampling))
        if isinstance(row.get("prompt"), str):
            prompt.text = row["prompt"]
        elif row.get("messages"):
            tools, arguments = from_json(row.get("tools")), from_json(row.get("chat_template_kwargs"))
            prompt.chat.CopyFrom(to_chat(turns_of(row["messages"]), tools, arguments))
        return prompt if prompt.WhichOneof("input") else None
    except (TypeError, ValueError, LookupError, AttributeError):
        return None


def _kind(chat: experience_pb2.Chat) -> tuple[object, ...]:
    """Return what decides which parts of a template render a chat."""
    roles = tuple((turn.role, *json.loads(turn.template_fields or "{}")) for turn in chat.messages)
    return (roles, chat.template_arguments, bool(chat.tools))
