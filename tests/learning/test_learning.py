"""The short learning test: forty steps lift held-out accuracy; the same steps with shuffled answers do not.

The control answers what a rising curve alone cannot: that it is the reward that teaches, not, say, sharper sampling.
"""

import json
import subprocess
from pathlib import Path

import curve_runs
import pytest

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session", autouse=True)
def prepared() -> None:
    """The demo's warmed-up model and data; made once, kept."""
    curve_runs.prepare()


def lift(folder: Path, *settings: str) -> float:
    """What forty steps gain in accuracy on the held-out problems."""
    words = [curve_runs.ENVIRONMENTS / "client/bin/quartet", "run", "examples/arithmetic/run.toml", "--plain"]
    for setting in (f"run.folder={folder}", "run.max_steps=40", "trainer.evaluation.interval=20", *settings):
        words += ["--set", setting]
    done = subprocess.run(words, cwd=curve_runs.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row["eval/heldout/ans_acc"] for row in rows if row["kind"] == "evaluation"]
    return accuracies[-1] - accuracies[0]


def test_rewards_teach(tmp_path):
    assert lift(tmp_path / "run", "run.id=learning") > 0.25


def test_shuffled_rewards_do_not(tmp_path):
    shuffled = curve_runs.shuffled(tmp_path, seed=0)
    assert lift(tmp_path / "run", "run.id=shuffled", f"data.train={shuffled}") < 0.08
