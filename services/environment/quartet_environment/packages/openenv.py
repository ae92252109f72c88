"""Environments that an OpenEnv server serves by tools (MCP), played with the package `openenv` 0.10 over chats."""

import json
from collections.abc import Awaitable, Iterator
from typing import Annotated, Any

from openenv.core.client_types import StepResult
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction, ListToolsObservation, ToolErrorType
from openenv.core.mcp_client import MCPToolClient
from pydantic import Field, StringConstraints

from quartet_environment.agent import Endpoint, Reward, Task

_OF_THE_MODEL = (ToolErrorType.INVALID_ARGS, ToolErrorType.TOOL_NOT_FOUND)
"""Errors of a call for the model to read; after others the episode failed."""

Url = Annotated[str, StringConstraints(pattern=r"^https?://.")]


def tasks(*, count: int = 1000, reset: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield what to reset the environment with: the seeds from 0, and `reset`."""
    for seed in range(count):
        yield {"id": f"seed-{seed}", "reset": {"seed": seed, **(reset or {})}}


async def play(
    task: Task, endpoint: Endpoint, *, url: Url, max_turns: Annotated[int, Field(ge=1)] = 8, seconds: float = 60.0
) -> Reward:
    """An OpenEnv server's environment, by its tools.

    Args:
        url: of the server, whose sessions at once must be as many as the episodes at once.
        max_turns: answers of the policy after which the episode ends; at most run.environment.max_turns.
        seconds: longest wait for an answer of the server.

    The reward is the sum of those that the environment gives; without a call, 0. Raises ConnectionError if the server
    or a tool fails: the episode is then played again.
    """
    client = MCPToolClient(base_url=url, connect_timeout_s=seconds, message_timeout_s=seconds)
    try:
        first = await _asked(url, client.reset(**task.data.get("reset", {})))
        found = await _asked(url, client.step(ListToolsAction()))
        if not isinstance(found.observation, ListToolsObservation) or not found.observation.tools:
            raise ValueError(f"the OpenEnv server at {url} has no tools; use a function of your own (docs/agents.md)")
        tools: Any = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in found.observation.tools
        ]
        messages: list[Any] = list(task.messages) or [{"role": "user", "content": _shown(first)}]
        rewards: list[float | None] = []
        done, turns = first.done, 0
        while not done and turns < max_turns:
            turns += 1
            said = await endpoint.client.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)
            message = said.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                content, result = await _called(url, client, call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                if result is not None:
                    rewards.append(result.reward)
                    done = done or result.done
            done = done or not message.tool_calls
    finally:
        await client.close()
    if rewards and all(one is None for one in rewards):
        raise ValueError(f"the OpenEnv server at {url} gave no reward; use a function of your own (docs/agents.md)")
    return Reward(sum(float(one) for one in rewards if one is not None), notes=f"{turns} turns, {len(rewards)} calls")


async def _asked(url: str, asking: Awaitable[Any]) -> Any:
    """Return a server's answer. Raises ConnectionError: the episode is not to blame for the server's failures."""
    try:
        return await asking
    except Exception as error:
        raise ConnectionError(f"the OpenEnv server at {url} failed: {error!r}") from error


async def _called(url: str, client: MCPToolClient, function: Any) -> tuple[str, StepResult[Any] | None]:
    """Call a tool. Return what the model reads, and the step, unless the call was wrong. Raises ConnectionError."""
    try:
        action = CallToolAction(tool_name=function.name, arguments=json.loads(function.arguments or "{}"))
    except ValueError as error:
        return f"error: the arguments must be a JSON object: {error}", None
    result = await _asked(url, client.step(action))
    wrong = getattr(result.observation, "error", None)
    if wrong is None:
        return _shown(result), result
    if wrong.error_type in _OF_THE_MODEL:
        return f"error: {wrong.message}", None
    raise ConnectionError(f"tool '{function.name}' of the OpenEnv server at {url} failed: {wrong.message}")


def _shown(result: StepResult[Any]) -> str:
    """Return what the model reads of a step: a tool's text, or the observation's own fields as JSON."""
    observation = result.observation.model_dump(
        mode="json", exclude={"done", "reward", "metadata", "tool_name", "error"}
    )
    answer = observation.get("result", observation)
    parts = answer.get("content") if isinstance(answer, dict) else None
    if isinstance(parts, list):
        return "\n".join(part["text"] if "text" in part else json.dumps(part) for part in parts)
    if answer == {}:  # some environments say all in their metadata
        answer = result.observation.metadata
    return answer if isinstance(answer, str) else json.dumps(answer)
