"""The examples of docs/agents.md: their run files, and episodes of theirs with a policy that is a function."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from model_endpoint import model_endpoint
from quartet.v1 import environment_pb2

from quartet_common.config import load_config
from quartet_common.sources import task_sources
from quartet_environment.agent import Endpoint, Task
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.function import Function
from quartet_environment.seats import read_result

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DEMO = "arithmetic/agent.toml"
RUN_FILES = (DEMO, "calculator/run.toml", "langgraph/run.toml", "reasoning_gym/run.toml", "verifiers_game/run.toml")
PROBLEM = "2+3-1+2=?"
SAMPLING = {"temperature": 1.0, "max_tokens": 32}


def calculates(so_far: str) -> str:
    """A policy that writes the next term of PROBLEM's sum and "=", and at last what the calculator wrote."""
    steps = ("<think>2+3=", "-1=", "+2=", "</think><answer>{}</answer>")
    results = re.findall(r"=(-?\d+)", so_far.removeprefix(PROBLEM))
    return steps[len(results)].format(results[-1] if results else "")


def never_ends(so_far: str) -> str:
    return "1+1="


@pytest.mark.parametrize("name", RUN_FILES)
def test_run_files_name_environments_that_load_and_take_their_parameters(name, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    config = load_config("environment", EnvironmentServiceSection, path=EXAMPLES / name)
    assert config.run.environment.served
    Function(config.run.environment.spec_name).check(config.run.environment.parameters)
    for _, source in task_sources(config.data):
        tasks = Function(source["environment"])
        assert next(tasks.tasks(tasks.check(source.get("parameters", {}))))


@pytest.mark.parametrize("name", RUN_FILES[1:])
def test_run_files_differ_in_the_environment_the_data_and_the_steps_alone(name):
    demo, own = (tomllib.loads((EXAMPLES / one).read_text()) for one in (DEMO, name))
    for tree in (demo, own):
        del tree["data"], tree["run"]["id"], tree["run"]["environment"], tree["run"]["max_steps"]
    template = own["model"].pop("chat_template", None)
    assert template is None or (EXAMPLES.parent / template).is_file()
    assert own == demo


@pytest.mark.parametrize("name", ["calculator", "langgraph"])
@pytest.mark.parametrize(
    ("policy", "answer", "reward"), [(calculates, "6", 1), (calculates, "7", 0), (never_ends, "6", 0)]
)
async def test_the_calculator_is_a_tool(name, policy, answer, reward):
    play = Function(f"{EXAMPLES}/{name}/agent.py:play")
    task = Task("p", {}, [{"role": "user", "content": PROBLEM}], answer, {}, 0, SAMPLING)
    with model_endpoint(writes=policy) as (url, asked):
        assert await play.play(task, Endpoint(url, "episode-key", "policy"), play.check({})) == reward
    assert len(asked) == (4 if policy is calculates else 7)
    assert {one["headers"]["authorization"] for one in asked} == {"Bearer episode-key"}
    assert all(one["body"]["stop"] in ("=", ["="]) for one in asked)
    if policy is calculates:
        last = asked[-1]["body"]
        text = last["prompt"] if "prompt" in last else "".join(one["content"] for one in last["messages"])
        assert text == PROBLEM + "<think>2+3=5-1=4+2=6"


async def test_the_calculator_has_an_answer_to_no_sum():
    play = Function(f"{EXAMPLES}/calculator/agent.py:play")
    task = Task("p", {}, [{"role": "user", "content": PROBLEM}], "?", {}, 0, SAMPLING)
    with model_endpoint(writes=lambda so_far: "=" if so_far == PROBLEM else "") as (url, asked):
        assert await play.play(task, Endpoint(url, "key", "policy"), play.check({})) == 0
    assert [one["body"]["prompt"] for one in asked] == [PROBLEM, PROBLEM + "=?"]


@pytest.mark.asyncio(loop_scope="session")  # verifiers' environments live as long as the loop
@pytest.mark.parametrize(
    ("answers", "rewards"),
    [(["{}", "{}"], (1, 1)), (["{}", "77"], (1, 0)), (["6", ""], (0, 0)), (["none", ""], (0, 0))],
)
async def test_the_game_has_a_second_turn_about_the_first_answer(answers, rewards):
    game = Function("verifiers")
    checked = game.check({"id": "carry_on"})
    data = json.loads(json.dumps(next(game.tasks(checked))))
    said = [f"<answer>{one}</answer>".format(total) for one, total in zip(answers, data["totals"], strict=True)]

    def writes(so_far: str) -> str:
        return said[so_far.count("=?") - 1]

    with model_endpoint(writes=writes) as (url, asked):
        played = await game.play(Task("p", data, [], "", checked, 0, SAMPLING), Endpoint(url, "k", "m"), checked)
    (seat,) = environment_pb2.EpisodeResult(**read_result(played)).seats
    assert {one.name: (one.value, one.weight) for one in seat.rewards} == {
        name: (value, 0.5) for name, value in zip(("first", "second"), rewards, strict=True)
    }
    asked_for = [one["body"]["messages"][-1]["content"] for one in asked]
    assert asked_for == [data["prompt"], f"{data['totals'][0]}{data['then']}=?"][: 1 + rewards[0]]


def test_the_game_holds_out_tasks_and_knows_their_answers():
    game = Function("verifiers")
    parts = [list(game.tasks({"id": "carry_on", "taskset": {"held_out": part}})) for part in (False, True)]
    train, held_out = ({one["prompt"] for one in part} for part in parts)
    assert len(train) == len(parts[0]) > 1000 and len(held_out) > 100 and not train & held_out
    for one in parts[0]:
        total = eval(one["prompt"].removesuffix("=?"))
        assert one["totals"] == [total, total + eval(one["then"])] and 1 <= total <= 5
