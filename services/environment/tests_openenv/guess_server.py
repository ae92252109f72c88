"""An OpenEnv server without tools: `python guess_server.py PORT`. The action is a word, to be said once."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Told(Observation):
    hint: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.steps = 0
        return Told(hint=f"say word{seed}")

    def step(self, action: Say, timeout_s=None, **_):
        self.steps += 1
        return Told(hint="again word7", reward=float(action.message.startswith("word")), done=self.steps == 2)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Say, Told, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
