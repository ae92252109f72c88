"""What the dry run says of environments and their parameters."""

import json
import sys
from pathlib import Path

import pytest

from quartet_common.config import ConfigError, load_config
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.environments import load_environments
from quartet_environment.preflight import preflight

FILE = """
from typing import Literal
print("printed when it is loaded")

async def play(task, endpoint, *, level: Literal["easy", "hard"] = "easy", tries: int = 3):
    "Plays."
    return 1.0

def tasks(count: int = 2):
    yield from ({"n": i} for i in range(count))

def short(task): ...
def anything(task, endpoint, **more): ...
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("import no_such_package\ndef play(task, endpoint): ...")
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\ndef play(task, endpoint): ...")
    return "agent.py"


def checked(*overrides: str):
    return preflight(load_config("environment", EnvironmentServiceSection, overrides=overrides))


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(*overrides)
    return list(caught.value.problems)


def test_the_runs_environment_and_the_sections_are_served(file):
    plan = checked('run.environment="agent.py:play"', 'environment.files=["agent.py:anything"]')
    assert plan["environments"] == ["agent.py:anything", "agent.py:play"]
    overrides = ['run.environment="agent.py:play"']
    (one,) = load_environments(load_config("environment", EnvironmentServiceSection, overrides=overrides)).values()
    assert one.description == "Plays." and one.has_tasks
    assert set(one.schema["properties"]) == {"level", "tries", "count"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"file": "agent.py:play", "parameters": {"level": "harder"}},
            "run.environment.parameters.level: got 'harder'",
        ),
        ({"file": "agent.py:play", "parameters": {"leve": 1}}, "run.environment.parameters.leve: got an unknown param"),
        ({"file": "agent.py:short"}, "run.environment.file: 'agent.py:short' takes (task); it must take (task, endpo"),
        ({"file": "agent.py:pay", "served": True}, "run.environment.file: 'agent.py' has no function 'pay'; it has: "),
        ({"file": "broken.py:play"}, "if it is a package, install it: "),
        ({"file": "ends.py:play"}, "'ends.py:play' ended its process with status 3"),
        (
            {"name": "verifiers", "served": True},
            "run.environment: 'verifiers' needs a package: quartet env add environm",
        ),
        ({"name": "other", "served": True}, "run.environment: no environment 'other' is served; allowed: none; add"),
    ],
)
def test_what_cannot_be_played_is_named(file, environment, said):
    table = ", ".join(f"{key} = {_toml(value)}" for key, value in environment.items())
    (problem,) = refused(f"run.environment={{{table}}}")
    assert said in problem


def _toml(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def test_environments_of_rows_are_checked(file, tmp_path):
    rows = [
        {"prompt": "a", "environment": {"file": "agent.py:play", "parameters": {"tries": "many"}}},
        {"prompt": "a", "environment": "agent.py:anything"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = refused('data.train="rows.jsonl"', 'environment.files=["agent.py:play"]')
    assert ["rows.jsonl, line 1: environment.parameters.tries: got 'many'" in problems[0], len(problems)] == [True, 2]
    assert "rows.jsonl, line 2: environment: no environment 'agent.py:anything' is served" in problems[1]


def test_parameters_of_the_run_and_of_its_data_are_all_checked(file):
    run = 'run.environment={file="agent.py:play", parameters={tries="many"}}'
    problems = refused(run, 'data.train={environment="agent.py:play", parameters={count="few", level="easy"}}')
    assert [problem.split(";")[0] for problem in problems] == [
        "run.environment.parameters.tries: got 'many'",
        "data.train.parameters.count: got 'few'",
    ]


def test_what_the_data_are_tasks_of_is_served(file):
    train = 'data.train={environment="agent.py:play"}'
    assert checked(train, 'data.evaluation={held={environment="agent.py:anything"}}')["environments"] == [
        "agent.py:anything",
        "agent.py:play",
    ]
    (problem,) = refused('data.train=["rows.jsonl", {environment="agent.py:pay"}]')
    assert problem.startswith("data.train[1].environment: 'agent.py' has no function 'pay'")
    (problem,) = refused('data.train={environment="agent.py:pay"}')
    assert problem.startswith("data.train.environment: 'agent.py' has no function 'pay'")


def test_parameters_of_tasks_are_checked(file):
    (problem,) = refused('data.train={environment="agent.py:play", parameters={count="many"}}')
    assert problem.startswith("data.train.parameters.count: got 'many'")
    (problem,) = refused('data.train={environment="verifiers"}')
    assert problem.startswith("data.train.environment: 'verifiers' needs a package: ")


def test_packages_bring_environments(file, tmp_path, monkeypatch):
    (tmp_path / "brought.py").write_text("async def play(task, endpoint, *, level: int = 0):\n    return 1.0\n")
    info = tmp_path / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quartet.served_environments]\nbrought = brought:play\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert checked('run.environment={name="brought", served=true}')["environments"] == ["brought"]
    assert checked()["environments"] == ["brought"]
    assert checked('run.environment="agent.py:play"')["environments"] == ["agent.py:play"]
    (problem,) = refused('run.environment={name="bought", served=true}')
    assert (
        problem
        == "run.environment: no environment 'bought' is served; allowed: brought; add a file to environment.files"
    )
    (problem,) = refused('run.environment={name="brought", served=true, parameters={level="x"}}')
    assert problem.startswith("run.environment.parameters.level: got 'x'")
