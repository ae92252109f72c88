"""Checks before the rollout starts, and with --dry-run: engine, environments, model, and the data against the model, if
both are on this host. Imports no torch.

A chat template may reject some sequences of roles, so one chat of each sequence is rendered. This uses Jinja itself,
because importing transformers takes seconds.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from quartet_common.config import ConfigError, EnvironmentSection, LoadedConfig
from quartet_common.data_rows import data_rows, sections_of_rows
from quartet_common.hub import TOKENIZER_FILES
from quartet_common.model_folder import read_model_folder
from quartet_common.ports import interface_address
from quartet_common.run_file import Problems
from quartet_common.run_spec import environment_spec
from quartet_common.transports import load_transports
from quartet_rollout.config import OWN_ENGINES, RolloutSection
from quartet_rollout.engines.base import EngineError
from quartet_rollout.engines.model_folder import context_length
from quartet_rollout.environments import load_environments
from quartet_rollout.environments.registry import UnknownEnvironment, read_environment
from quartet_rollout.generation import PromptRefused


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
    # Our own engines have the names of their libraries.
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
                context = context_length(str(folder), f"rollout.{section.engine}.max_model_len", context)
            check_prompt_lengths(config, context)
        with problems.collecting():
            check_chats(folder, config.data, config.run.system_prompt)


def _environments(config: LoadedConfig[RolloutSection]) -> Iterator[tuple[str, EnvironmentSection]]:
    """Yield the run's environment and each distinct one in rows of the data, with the place that names it."""
    if config.run.environment is not None:
        yield "run.environment", config.run.environment
    yield from sections_of_rows(config.data, "environment", EnvironmentSection)


def check_prompt_lengths(config: LoadedConfig, max_model_len: int | None) -> None:
    """Raise ConfigError, naming file and line, for the first prompt in [data] that leaves no room for a completion.

    The client checks files that are not on this host, and lines that are no prompts.
    """
    folder = config.model.path
    if config.run.long_prompts == "truncate_left":
        return
    if folder is None or not (folder / "tokenizer.json").is_file():
        return
    context = max_model_len or json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if not context:
        return
    sampling = config.run.sampling
    room = context - sampling.max_new_tokens
    why = f"the model's context of {context} less run.sampling.max_new_tokens ({sampling.max_new_tokens})"
    if 0 < config.run.max_prompt_tokens < room:
        room, why = config.run.max_prompt_tokens, "run.max_prompt_tokens"
    tokenizer: Any = None
    for where, row in data_rows(config.data):
        text = _text(row)
        if len(text.encode()) <= room:
            continue  # there are at most as many tokens as bytes
        if tokenizer is None:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if tokens > room:
            raise ConfigError(f"{where}: the prompt has {tokens} tokens; allowed: at most {room}, {why}")


def _text(row: dict[str, Any]) -> str:
    if isinstance(row.get("prompt"), str):
        return row["prompt"]
    return "".join(message["content"] for message in _messages(row.get("messages") or [], ""))


Messages = list[dict[str, str]]


def check_chats(model: Path, data: Mapping[str, Any], system_prompt: str) -> None:
    """Raise ConfigError, naming file and line, for the first chat in [data] that the model's template rejects.

    Args:
        model: the model's folder. Without a template nothing is checked here.
        data: the section [data].
        system_prompt: prepended to chats without a system message.
    """
    template, tokens = _template(model)
    seen = set()
    for where, row in data_rows(data, "messages") if template else ():
        messages = _messages(row["messages"], system_prompt)
        roles = tuple(message["role"] for message in messages)
        if roles in seen:
            continue
        seen.add(roles)
        if reason := _refusal(template, messages, tokens):
            added = " after run.system_prompt" if system_prompt and messages[0]["content"] == system_prompt else ""
            raise ConfigError(
                f"{where}: the model's chat template refuses the roles {', '.join(roles)}{added}: {reason}; allowed: a "
                'chat it renders, or "prompt", whose text is used as it stands'
            )


def _template(model: Path) -> tuple[str, dict[str, str]]:
    """Return the template, "" if there is none or it is not a string, and the special tokens that it may use."""
    try:
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    own = model / "chat_template.jinja"
    template = own.read_text(encoding="utf-8") if own.is_file() else settings.get("chat_template")
    tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and (isinstance(value, str) or isinstance(value, dict) and "content" in value)
    }
    return template if isinstance(template, str) else "", tokens


def _messages(given: Any, system_prompt: str) -> Messages:
    given = {"role": "user", "content": given} if isinstance(given, str) else given
    turns = given if isinstance(given, list) else [given]
    messages = [
        {"role": str(turn.get("role")), "content": str(turn.get("content", ""))}
        for turn in turns
        if isinstance(turn, dict)
    ]
    if system_prompt and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _refusal(template: str, messages: Messages, tokens: dict[str, str]) -> str:
    """Return why the template rejects a chat; "" if it renders it, or has syntax that only transformers supports."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
    except TemplateSyntaxError:
        return ""
    except Exception as error:  # a template may raise anything
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""
