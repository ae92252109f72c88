"""Short whole runs of what is trained in other ways than the demo: each ends, and counts every group exactly once."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
TALK = """
import string
from quartet_rollout.environments import Answer, Parameters

class Talk:
    name, description, parameters = "talk", "Asks for more after every character.", Parameters
    stop = lambda self, parameters: tuple(string.printable)
    begin = lambda self, start, parameters, tools: self
    async def answer(self, turn): return Answer("more")
    async def close(self): pass
"""
STEPS = 3
GROUPS_PER_STEP = 2  # of the run file in conftest.py


def steps_of(folder: Path) -> Iterator[dict]:
    return (row for row in map(json.loads, (folder / "metrics.jsonl").open()) if row["kind"] == "step")


@pytest.fixture
def train(launch, run_file, tmp_path):
    """Run to the end with settings; return the metrics of the steps."""

    def run(*settings: str) -> list[dict]:
        launched = launch(run_file, *(word for setting in settings for word in ("--set", setting)))
        assert launched.wait(240) == 0, launched.said()
        launched.assert_gone(within=2.0)
        groups = STEPS * GROUPS_PER_STEP
        assert f"{groups} exactly once, 0 lost, 0 twice, 0 stuck" in launched.said(), launched.said()
        steps = list(steps_of(tmp_path / "run"))
        assert len(steps) == STEPS
        return steps

    return run


def test_ppo_with_its_metrics_in_weights_and_biases(train, tmp_path):
    steps = train("trainer.algorithm=ppo", "trainer.callbacks=[{name='wandb', parameters={group='tests'}}]")
    assert all("train/value_loss" in step for step in steps)
    assert list(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb"))
    assert (tmp_path / "run" / "critic" / "value_head.safetensors").is_file()


def test_dapo_on_programs(train, tmp_path):
    """An untrained model writes none, so each step has groups of equal rewards, and is trained as it is in the end."""
    row = {"prompt": "print 3", "test_cases": {"inputs": [""], "outputs": ["3"]}}
    (tmp_path / "train.jsonl").write_text(8 * f"{json.dumps(row)}\n")
    steps = train("trainer.algorithm=dapo", "trainer.dynamic_sampling.max_refills=1", "run.verifiers=['code']")
    assert all(step["reward/ans_acc"] == 0 for step in steps)


def test_gspo_beside_a_rollout_that_sleeps_while_a_step_is_trained(train):
    steps = train("trainer.algorithm=gspo", "launcher.colocate=sleep")
    assert [step["weights/rollouts"] for step in steps][1:] == [1.0, 1.0]


def test_adapter_on_conversations_of_several_turns(train, tmp_path):
    (tmp_path / "talk.py").write_text(TALK)
    settings = (f"run.environment={{file='{tmp_path / 'talk.py'}:Talk', max_turns=3}}", "trainer.lora.r=4")
    steps = train(*settings, "run.sampling.max_new_tokens=60", "trainer.rollout_log_completions=all")
    assert all(step["batch/trained_tokens"] < step["batch/completion_tokens"] for step in steps), "answers are no loss"
    assert (tmp_path / "run" / "model" / "config.json").is_file()
