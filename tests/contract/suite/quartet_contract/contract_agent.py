"""The environment that the cases of EnvironmentService play; an implementation in another language has its like.

`environment.files = ["…/quartet_contract/contract_agent.py:play"]`, or one named "contract", with the parameter `scale`
and two tasks. A task is `{"act": …}`: what the agent does.
"""

import asyncio
import math
from collections.abc import Iterator
from typing import Any


async def play(task: Any, endpoint: Any, *, scale: float = 1.0) -> float:
    """Do what the task says, without the endpoint."""
    match task.data.get("act"):
        case "raise":
            raise KeyError("asked to raise")
        case "nan":
            return math.nan
        case "hang":
            await asyncio.sleep(3600)
    return 0.5 * scale


def tasks() -> Iterator[dict[str, Any]]:
    """Yield two tasks."""
    yield {"id": "first", "act": "reward"}
    yield {"id": "second", "act": "reward"}
