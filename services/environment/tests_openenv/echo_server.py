"""An OpenEnv server by its own package: `python echo_server.py PORT`. It echoes, and pays for the word of the day."""

import sys
import time

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

WORDS = ("ping", "pong")


class EchoEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("echo")

        @mcp.tool
        def echo(message: str) -> str:
            """Echo a message."""
            if message == "boom":
                raise RuntimeError("the echo is broken")
            if message == "slow":
                time.sleep(5)
            return f"echo: {message}"

        super().__init__(mcp)
        self._word, self._state, self._pays = "", State(), True

    def reset(self, seed=None, episode_id=None, pays=True, **_):
        self._word, self._pays = WORDS[(seed or 0) % len(WORDS)], pays
        return Observation(metadata={"message": f"echo {self._word}"})

    async def step_async(self, action: Action, timeout_s=None, **more):
        seen = await super().step_async(action, timeout_s=timeout_s, **more)
        if isinstance(action, CallToolAction) and self._pays:
            seen.reward = float(action.arguments.get("message") == self._word)
            seen.done = action.arguments.get("message") == "end"
        return seen

    def _step_impl(self, action: Action, timeout_s=None, **_):
        return Observation()

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(EchoEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
