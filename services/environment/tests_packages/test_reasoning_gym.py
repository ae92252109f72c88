"""The example that plays tasks of reasoning-gym."""

import itertools
import json
from pathlib import Path

import pytest
from model_endpoint import model_endpoint

from quartet_environment.agent import Endpoint, Task
from quartet_environment.function import Function

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "reasoning_gym" / "agent.py"


@pytest.fixture(scope="module")
def example() -> Function:
    return Function(f"{EXAMPLE}:play")


def test_tasks_are_sums_and_none_is_in_both_parts(example):
    train, held_out = (
        list(itertools.islice(example.tasks({"held_out": part, "seed": 1}), 200)) for part in (False, True)
    )
    assert len(train) == len(held_out) == 200
    assert not {one["problem"] for one in train} & {one["problem"] for one in held_out}
    for one in json.loads(json.dumps(train)):
        assert eval(one["problem"].removesuffix("=?")) == int(one["entry"]["answer"])


@pytest.mark.parametrize(("said", "reward"), [("<answer>{}</answer>", 1.0), ("<answer>77</answer>", 0.0), ("{}", 0.0)])
async def test_its_own_verifier_gives_the_reward(example, said, reward):
    task = json.loads(json.dumps(next(example.tasks({}))))
    with model_endpoint(text=said.format(task["entry"]["answer"])) as (url, asked):
        given = Task("p", task, [], "", {}, 0, {})
        assert await example.play(given, Endpoint(url, "key", "policy"), {}) == reward
    assert asked[0]["body"]["prompt"] == task["problem"]
