"""Renders chats with the model's chat template, as transformers does, and refuses what the template would drop.

A template may ignore a role, tools, tool calls or a variable without an error: the prompt would lack them. The first
chat of each kind is therefore rendered again without each of them; if nothing changes, the chat is refused.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quartet.v1 import experience_pb2

from quartet_common.chats import continued_text
from quartet_rollout.generation import PromptRefused

Message = dict[str, Any]

INSTRUCTIONS = ("system", "developer")
"""Roles of messages that are no turns."""

_OTHER = ("a", "b")  # contents, one of which differs from a message's


@dataclass(frozen=True)
class Chat:
    """What a template renders."""

    messages: list[Message]
    tools: list[Any] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def continued(self) -> bool:
        """Whether completions continue a last message of the assistant."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def kind(self) -> tuple[object, ...]:
        """Chats of one kind use the same features of a template."""
        shapes = dict.fromkeys((message["role"], *message) for message in self.messages)
        return (*shapes, self.continued, bool(self.tools), *self.arguments)


class ChatRenderer:
    """Renders the chats of one model."""

    def __init__(self, tokenizer: Any):
        """`tokenizer` is the model's transformers tokenizer."""
        self._tokenizer = tokenizer
        self._rendered: set[tuple[object, ...]] = set()

    def read(self, chat: experience_pb2.Chat, system_prompt: str) -> Chat:
        """Return a chat of the contract, begun with a system prompt if it has neither system nor developer message.

        Raises:
            PromptRefused: the chat has no message, the model no template, or JSON cannot be read.
        """
        if not chat.messages:
            raise PromptRefused("prompt.chat.messages", "none", "at least one message")
        if getattr(self._tokenizer, "chat_template", "") is None:
            raise PromptRefused("prompt.chat", "a chat, and the model has no chat template", "text or token_ids")
        messages = [
            {
                "role": message.role,
                "content": message.content,
                **_read_json(message.template_fields, f"messages[{at}].template_fields", dict),
            }
            for at, message in enumerate(chat.messages)
        ]
        if system_prompt and not any(message["role"] in INSTRUCTIONS for message in messages):
            messages.insert(0, {"role": "system", "content": system_prompt})
        if messages[-1]["role"] == "assistant" and "tool_calls" in messages[-1]:
            raise PromptRefused(
                f"prompt.chat.messages[{len(chat.messages) - 1}]",
                "tool calls of the assistant in the last message",
                "the tools' answers after them, or a text, which is continued",
            )
        return Chat(
            messages,
            _read_json(chat.tools, "tools", list),
            _read_json(chat.template_arguments, "template_arguments", dict),
        )

    def render(self, chat: Chat, generation_prompt: bool = True) -> str:
        """Return the prompt's text, up to where the completion begins.

        Args:
            generation_prompt: False: end with the last message.

        Raises:
            PromptRefused: the template refuses the chat, or ignores a part of it.
        """
        text = self._apply(chat, generation_prompt)
        if chat.kind not in self._rendered:
            self._check_all_shown(chat, text, generation_prompt)
            self._rendered.add(chat.kind)
        return text

    def _apply(self, chat: Chat, generation_prompt: bool) -> str:
        options: dict[str, Any] = {"add_generation_prompt": generation_prompt}
        if chat.continued and generation_prompt:
            options = {"continue_final_message": True}
        if chat.tools:
            options["tools"] = chat.tools
        try:
            return self._tokenizer.apply_chat_template(chat.messages, tokenize=False, **options, **chat.arguments)
        except Exception as error:  # a chat template may raise anything
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise PromptRefused(
                "prompt.chat",
                f"what the model's chat template refuses ({reason})",
                "a chat it can render, text or token_ids",
            ) from error

    def _check_all_shown(self, chat: Chat, text: str, generation_prompt: bool) -> None:
        for name, came, other in _without(chat):
            if self._apply(other, generation_prompt) == text:
                raise PromptRefused(
                    f"prompt.chat.{name}",
                    f"{came}, which the model's chat template ignores",
                    "what it shows: another model.chat_template, or chats without that",
                )
        template = self._tokenizer.get_chat_template(tools=chat.tools or None) if chat.arguments else ""
        for name in chat.arguments:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise PromptRefused(
                    "prompt.chat.template_arguments",
                    f"'{name}', which the model's chat template does not read",
                    "variables that it reads",
                )


def _without(chat: Chat) -> Iterator[tuple[str, str, Chat]]:
    """Yield the name of each part that a template may ignore, what it is, and the chat without it."""
    if chat.tools:
        yield "tools", "tools", replace(chat, tools=[])
    roles = set()
    for at, message in enumerate(chat.messages):
        if message["role"] != "assistant" and message["content"] and message["role"] not in roles:
            roles.add(message["role"])
            other = _OTHER[message["content"] == _OTHER[0]]
            yield f"messages[{at}]", f"the role '{message['role']}'", _with(chat, at, {**message, "content": other})
        if message.get("tool_calls"):
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            yield f"messages[{at}].tool_calls", "tool calls", _with(chat, at, kept)


def _with(chat: Chat, at: int, message: Message) -> Chat:
    return replace(chat, messages=[*chat.messages[:at], message, *chat.messages[at + 1 :]])


def _read_json(text: str, name: str, kind: type) -> Any:
    try:
        value = json.loads(text) if text else kind()
    except ValueError:
        value = None
    if not isinstance(value, kind):
        allowed = "a JSON array" if kind is list else "a JSON object"
        raise PromptRefused(f"prompt.chat.{name}", f"'{text[:60]}'", allowed)
    return value


def text_before_continued(text: str, chat: experience_pb2.Chat) -> str:
    """Return a prompt's text without the message that completions continue; its template may have trimmed that."""
    continued = continued_text(chat)
    return text.removesuffix(continued if text.endswith(continued) else continued.strip())
