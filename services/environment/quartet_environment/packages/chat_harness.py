"""What drives the model in an episode of `verifiers`: the chat loop of its harness "null", inside this process.

That harness starts a Python process for each turn, whose packages it asks the package index for.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

import httpx
import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]  # verifiers looks for the harness of a module here

HARNESS_ID = "quartet_chat"
# verifiers finds a harness by the name of a top-level module.
sys.modules[HARNESS_ID] = sys.modules[__name__]
_CONNECT_SECONDS = 60.0


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model, and calls the tools that it asks for, until it answers with text alone."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Run one segment of the conversation. A model call that fails or is refused ends it with status 1."""
        client = _client().with_options(base_url=endpoint, api_key=secret)
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(one) for one in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as connected:
            async with asyncio.timeout(_CONNECT_SECONDS):
                tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, connected)
            while True:
                try:
                    said = await client.chat.completions.create(
                        model=ctx.model, messages=messages, tools=tools or openai.omit
                    )
                except openai.OpenAIError as error:  # verifiers knows of a failure behind it, or that it is a stop
                    return ProgramResult(1, "", f"{type(error).__name__}: {error}")
                message = said.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(0, "", "")
                for call in message.tool_calls:
                    content = await _called(call.function, dispatch, connections)
                    answer = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": content}
                    messages.append(bound_tool_message(answer))


@cache
def _client() -> openai.AsyncOpenAI:
    """Return the client whose connections all episodes share: making one takes tens of milliseconds."""
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=httpx.Timeout(None))


async def _called(function: Any, dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    """Call a tool; return what it answers, or what is wrong with the call, for the model to read."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
    if function.name not in dispatch:
        return f"error: unknown tool {function.name!r}"
    return await call_mcp(connections, dispatch, function.name, arguments)
