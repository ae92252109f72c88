"""An environment of an OpenEnv server that has no tools: what the policy says is the action.

The typed client of the environment's own package can take the place of GenericEnvClient.
"""

import json
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from quartet_environment import Endpoint, Task


async def play(task: Task, endpoint: Endpoint, *, url: str, turns: int = 8) -> float:
    """Reset, step until it is done, and sum the rewards."""
    messages: list[Any] = []
    reward = 0.0
    async with GenericEnvClient(base_url=url) as environment:
        result = await environment.reset(**task.data.get("reset", {}))
        for _ in range(turns):
            messages.append({"role": "user", "content": json.dumps(result.observation)})
            said = await endpoint.client.chat.completions.create(model=endpoint.model, messages=messages)
            answer = said.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": answer})
            result = await environment.step({"message": answer})
            reward += float(result.reward or 0)
            if result.done:
                break
    return reward
