"""Chats that the model's template refuses, found before anything starts, where data and model are on this host.

What a template accepts depends on the roles and their order, so one chat of each order is rendered. The service renders
with transformers, whose import takes seconds: here plain Jinja goes first, and what that renders needs no second look.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet_common.config import ConfigError
from quartet_common.data_rows import data_rows

Messages = list[dict[str, str]]


def check_chats(model: Path, data: Mapping[str, Any], system_prompt: str) -> None:
    """Raise ConfigError, naming file and line, for the first chat in [data] that the model's template refuses.

    Args:
        model: the model's folder. One without a template is the client's business.
        data: the section [data].
        system_prompt: goes before chats that have no system message.
    """
    template, tokens = _template(model)
    seen = set()
    for where, row in data_rows(data, "messages") if template else ():
        messages = _messages(row["messages"], system_prompt)
        roles = tuple(message["role"] for message in messages)
        if roles in seen:
            continue
        seen.add(roles)
        if not _renders(template, messages, tokens) and (reason := _refusal(template, messages, tokens)):
            added = " after run.system_prompt" if system_prompt and messages[0]["content"] == system_prompt else ""
            raise ConfigError(
                f"{where}: the model's chat template refuses the roles {', '.join(roles)}{added}: {reason}; allowed: a "
                'chat it renders, or "prompt", whose text is used as it stands'
            )


def _template(model: Path) -> tuple[str, dict[str, str]]:
    """Return the template, empty if there is none or another form of it, and the special tokens that it may name."""
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
    turns = given if isinstance(given, list) else [given]
    messages = [
        {"role": str(turn.get("role")), "content": str(turn.get("content"))} for turn in turns if isinstance(turn, dict)
    ]
    if system_prompt and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _renders(template: str, messages: Messages, tokens: dict[str, str]) -> bool:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
    except Exception:  # a template is the model author's program; it may also use what transformers adds
        return False
    return True


def _refusal(template: str, messages: Messages, tokens: dict[str, str]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **tokens)
    except Exception as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""
