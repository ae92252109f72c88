"""An agent whose reward says what it sampled, and which fails as its task says the first time that it is played.

It appends a line to `played.jsonl` when an episode begins and when it ends, with the time.
"""

import asyncio
import json
import os
import time
from pathlib import Path

from quartet_environment import Endpoint, Task

TURNS = 2
PLAYED = "played.jsonl"


async def play(task: Task, endpoint: Endpoint, *, folder: str) -> float:
    """Two turns; between them the task's fate, once."""
    log = Log(Path(folder), f"{task.data['number']}/{task.index}")
    text, tokens = f"{task.data['number']}+{task.index}=?", []
    fate = task.data["fate"] if task.index == 0 and log.is_first() else ""
    log.say("began", fate=fate)
    try:
        for turn in range(TURNS):
            if turn == 1:
                await _meet(fate)
            whole = {"return_token_ids": True, "skip_special_tokens": False}
            answer = await endpoint.client.completions.create(model=endpoint.model, prompt=text, extra_body=whole)
            tokens += answer.choices[0].token_ids
            text += answer.choices[0].text + "\n"
    except BaseException as error:
        log.say("failed", error=type(error).__name__)
        raise
    log.say("returned", tokens=tokens)
    return worth(tokens)


def worth(tokens: list[int]) -> float:
    """Return the reward for tokens that were sampled: above 0, which a failure could be taken for."""
    return 1.0 + sum(tokens) % 97


async def _meet(fate: str) -> None:
    match fate:
        case "block":
            time.sleep(600)
        case "wait":
            await asyncio.sleep(600)
        case "deaf":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
        case "raise":
            raise ConnectionError("the tool is away")
        case "exit":
            os._exit(3)


class Log:
    """Of one episode."""

    def __init__(self, folder: Path, name: str):
        self._folder, self._name, self._began = folder, name, time.time()

    def is_first(self) -> bool:
        """Return whether the episode was not played before."""
        try:
            (self._folder / self._name.replace("/", "-")).open("x").close()
        except FileExistsError:
            return False
        return True

    def say(self, event: str, **fields: object) -> None:
        """Append a line, whole though other processes append theirs."""
        line = {"event": event, "name": self._name, "pid": os.getpid(), "began": self._began, **fields}
        with (self._folder / PLAYED).open("a") as file:
            file.write(json.dumps(line) + "\n")
