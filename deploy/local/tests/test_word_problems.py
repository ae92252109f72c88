"""examples/word_problems: its problems, and a short run with a small model."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ROOT

from quartet_common.ports import free_ports

sys.path.append(str(ROOT / "examples" / "word_problems"))
import problems  # noqa: E402

FOLDER = ROOT / "examples" / "word_problems"
pytestmark = pytest.mark.timeout(600)


def test_problems_are_what_their_steps_say_and_none_is_on_both_sides():
    train, held_out = problems.split(300, 40)
    assert not {one.text for one in train} & {one.text for one in held_out}
    assert len({one.text for one in train}) == 300 and len(held_out) == 40
    for one in train:
        expression = str(one.first)
        for operator, number in one.steps:
            expression = f"({expression}){operator}{number}"
        assert eval(expression) == one.answer and 1 <= one.answer <= problems.MOST
        thoughts = one.worked().partition("<think>\n")[2].partition("\n</think>")[0].splitlines()
        assert all(eval(line.partition("=")[0]) == int(line.partition("=")[2]) for line in thoughts)
        assert one.worked().endswith(f"\\boxed{{{one.answer}}}")
    habits = [one.habit(random.Random(seed)) for seed, one in enumerate(train)]
    guesses = sum(habit.startswith("<think>\n\n</think>") for habit in habits) / len(habits)
    assert 0.5 < guesses < 0.7
    right = sum(habit.endswith(one.worked()[-11:]) for habit, one in zip(habits, train, strict=True)) / len(train)
    assert 0 < right < 0.6


@pytest.fixture(scope="module")
def small(pythons, tmp_path_factory) -> Path:
    """The folder that prepare.py makes, with a model of one narrow layer and hardly any warm-up."""
    folder = tmp_path_factory.mktemp("word_problems")
    sizes = ["--width", "64", "--layers", "1", "--skill", "0", "--habit-steps", "1", "--train", "64", "--heldout", "8"]
    subprocess.run([pythons["trainer"], FOLDER / "prepare.py", folder, *sizes], check=True, timeout=300)
    return folder


def settings(small: Path, tmp_path: Path, more: str) -> list[str]:
    ports = zip(("broker", "reward", "rollout", "trainer"), free_ports(4, neighbor=100), strict=True)
    given = [
        f"run.folder={tmp_path / 'run'}",
        *(f"addresses.{name}=127.0.0.1:{port}" for name, port in ports),
        f"model.path={small / 'model'}",
        f"data.train={small / 'train.jsonl'}",
        f"data.evaluation={{heldout='{small / 'heldout.jsonl'}'}}",
        "rollout.engine=transformers",
        "run.groups_per_step=2",
        "run.group_size=2",
        "run.max_steps=2",
        more,
    ]
    return [word for setting in given for word in ("--set", setting)]


def test_its_way_with_a_small_model(launch, small, tmp_path):
    """The template's arguments apply to generation and to the exported model."""
    more = "model.template_arguments={enable_thinking=false}"
    launched = launch(FOLDER / "run.toml", *settings(small, tmp_path, more))
    assert launched.wait(240) == 0, launched.said()
    assert "step 2/2" in launched.said() and "evaluation heldout at version 2: accuracy" in launched.said()
    samples = (tmp_path / "run" / "samples" / "step-000000.md").read_text()
    prompts = re.findall(r"Prompt:\n\n```text\n(.*?)\n```", samples, re.S)
    assert prompts and all(prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for prompt in prompts)
    template = (tmp_path / "run" / "model" / "chat_template.jinja").read_text()
    assert template.startswith("{%- set enable_thinking = enable_thinking if enable_thinking is defined else False %}")
