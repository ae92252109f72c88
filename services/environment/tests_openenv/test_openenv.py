"""An OpenEnv server's environment, played by its tools against its own package's server."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from model_endpoint import model_endpoint

from quartet_environment.agent import Endpoint, Task
from quartet_environment.failures import of_exception
from quartet_environment.function import Function, InvalidParameter
from quartet_environment.seats import read_result

OPENENV = Function("openenv")
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "openenv" / "agent.py"


@contextmanager
def serving(script: str) -> Iterator[str]:
    """The URL of a server that a script of this folder runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, Path(__file__).with_name(script), str(port)])
    try:
        for _ in range(500):
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving("echo_server.py") as url:
        yield url


async def play(url: str, calls: list[str], reset: dict[str, Any] | None = None, **parameters: Any) -> tuple[Any, Any]:
    """Play with a model that makes these calls of the tool; return the result and what the model was asked."""
    checked = OPENENV.check({"url": url, **parameters})
    wanted = [(call, "echo") if call.startswith("{") else ("{}", call) for call in calls]
    with model_endpoint(calls=wanted) as (model, asked):
        task = Task("p", {"reset": reset or {}}, [], "", checked, 0, {})
        result = await OPENENV.play(task, Endpoint(model, "episode-key", "policy"), checked)
    return read_result(result), asked


def said(message: str) -> str:
    return json.dumps({"message": message})


async def test_rewards_of_all_steps_are_summed(server):
    result, asked = await play(server, [said("no"), said("pong"), said("pong")], {"seed": 1})
    (seat,) = result["seats"]
    assert seat["rewards"] == [{"name": "reward", "value": 2.0, "weight": 1.0}]
    messages = asked[-1]["body"]["messages"]
    assert json.loads(messages[0]["content"]) == {"message": "echo pong"}
    assert [one["content"] for one in messages if one["role"] == "tool"] == ["echo: no", "echo: pong", "echo: pong"]
    (tool,) = asked[0]["body"]["tools"]
    assert tool["function"]["name"] == "echo" and "message" in tool["function"]["parameters"]["properties"]


async def test_an_episode_ends_with_the_environment_or_its_turns(server):
    _, asked = await play(server, [said("end"), said("more")])
    assert len(asked) == 1
    _, asked = await play(server, [said("a"), said("b"), said("c")], max_turns=2)
    assert len(asked) == 2
    result, asked = await play(server, [])
    assert (result["seats"][0]["rewards"][0]["value"], len(asked)) == (0.0, 1)


async def test_wrong_calls_are_told_to_the_model(server):
    _, asked = await play(server, ["shout", '{"massage": "a"}', "{", said("end")])
    told = [one["content"] for one in asked[-1]["body"]["messages"] if one["role"] == "tool"]
    result, _ = await play(server, ["shout"])
    assert result["seats"][0]["rewards"][0]["value"] == 0.0
    assert "shout" in told[0] and told[1].startswith("error: ") and "must be a JSON object" in told[2]


@pytest.mark.parametrize(
    ("calls", "reset", "parameters", "reason", "retryable"),
    [
        ([said("boom")], {}, {}, "tool 'echo' of the OpenEnv server at URL failed", True),
        ([said("slow")], {}, {"seconds": 1.0}, "the OpenEnv server at URL failed: TimeoutError", True),
        ([said("a")], {"pays": False}, {}, "gave no reward; use a function", False),
    ],
)
async def test_failures_are_no_rewards(server, calls, reset, parameters, reason, retryable):
    with pytest.raises(Exception) as caught:
        await play(server, calls, reset, **parameters)
    failure = of_exception("openenv", "", caught.value)
    assert reason.replace("URL", server) in failure["message"] and failure["retryable"] is retryable


async def test_a_server_that_is_away_is_tried_again():
    with pytest.raises(ConnectionError, match="the OpenEnv server at http://127.0.0.1:9 failed"):
        await play("http://127.0.0.1:9", [])


def test_tasks_are_seeds_and_the_url_is_checked():
    parameters = OPENENV.check({"url": "http://a", "count": 2, "reset": {"level": 3}})
    assert [one["reset"] for one in OPENENV.tasks(parameters)] == [{"seed": 0, "level": 3}, {"seed": 1, "level": 3}]
    with pytest.raises(InvalidParameter) as caught:
        OPENENV.check({"url": "localhost:8000"})
    assert caught.value.key == "url"


async def test_the_example_plays_an_environment_without_tools():
    with serving("guess_server.py") as url, model_endpoint() as (model, asked):
        task = Task("p", {"reset": {"seed": 3}}, [], "", {}, 0, {})
        reward = await Function(f"{EXAMPLE}:play").play(task, Endpoint(model, "key", "policy"), {"url": url})
    assert reward == 2.0
    assert [len(one["body"]["messages"]) for one in asked] == [1, 3]
    assert json.loads(asked[0]["body"]["messages"][0]["content"])["hint"] == "say word3"
