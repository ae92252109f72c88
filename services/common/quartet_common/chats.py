"""Chats as rows have them, for the contract's Chat and for chat templates."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quartet.v1 import experience_pb2

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Keys of a message beside role and content, which templates may read."""
MEDIA = frozenset(("image", "images", "video", "videos", "audio", "audios"))
"""Columns of rows that a model of text would not see."""


def content_text(value: Any) -> Any:
    """Return a message's content as text: that of text parts in lines, as vLLM joins them.

    Raises:
        ValueError: a part is not text.
    """
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type", "of no type") if isinstance(part, Mapping) else repr(part)[:40]
            raise ValueError(f"got a part '{kind}'; allowed: parts of text")
        texts.append(text)
    return "\n".join(texts)


def called_tools(value: Any) -> Any:
    """Return tool calls with their arguments as an object, which templates expect, and not as its JSON text.

    Raises:
        ValueError: arguments are not JSON.
    """
    return (
        [_called(call) if isinstance(call, Mapping) else call for call in value] if isinstance(value, list) else value
    )


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _called(function)}
    return {**call, "arguments": from_json(call["arguments"])} if "arguments" in call else dict(call)


def turns_of(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a row that the client has accepted: a user's text, one message, or a list."""
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    turns = [turns] if isinstance(turns, Mapping) else turns
    given = [{key: part for key, part in turn.items() if part is not None} for turn in turns]
    return [
        {**turn, "content": content_text(turn.get("content", "")), "tool_calls": called_tools(turn.get("tool_calls"))}
        for turn in given
    ]


def from_json(value: Any) -> Any:
    """Return a value that may be given as its JSON text. Raises ValueError."""
    return json.loads(value) if isinstance(value, str) else value


def to_chat(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), arguments: Mapping[str, Any] | None = None
) -> experience_pb2.Chat:
    """Return the contract's Chat.

    Args:
        messages: with role, content and any of MESSAGE_FIELDS.
        tools: their definitions, in JSON Schema.
        arguments: variables of the chat template.
    """
    turns = [
        experience_pb2.Message(
            role=message["role"],
            content=message["content"],
            template_fields=_to_json({name: message[name] for name in MESSAGE_FIELDS if message.get(name)}),
        )
        for message in messages
    ]
    return experience_pb2.Chat(messages=turns, tools=_to_json(tools), template_arguments=_to_json(arguments))


def continued_text(chat: experience_pb2.Chat) -> str:
    """Return the text of a last message of the assistant, which completions continue; "" if there is none."""
    last = chat.messages[-1] if chat.messages else experience_pb2.Message()
    return last.content if last.role == "assistant" else ""


def as_json(chat: experience_pb2.Chat) -> str:
    """Return a chat's messages for reward functions, without one that completions continue: they begin with it."""
    turns = chat.messages[:-1] if chat.messages[-1].role == "assistant" else chat.messages
    return json.dumps(
        [{"role": turn.role, "content": turn.content, **json.loads(turn.template_fields or "{}")} for turn in turns],
        ensure_ascii=False,
    )


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""
