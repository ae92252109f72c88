"""The short learning test: docs/start.md's forty steps lift held-out accuracy; with shuffled answers forty do not.

The control answers what a rising curve alone cannot: that it is the reward that teaches, not, say, sharper sampling.
"""

import json
import subprocess
from pathlib import Path

import curve_runs
import first_hour
import pytest

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session", autouse=True)
def prepared() -> None:
    """The demo's warmed-up model and data; made once, kept."""
    curve_runs.prepare()


def lift(folder: Path) -> float:
    """What a run gained in accuracy on the held-out problems."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row["eval/heldout/ans_acc"] for row in rows if row["kind"] == "evaluation"]
    return accuracies[-1] - accuracies[0]


def test_a_researchers_first_hour_ends_with_a_curve_that_rises(tmp_path):
    """Two files and the page's commands, in a folder that looks like a checkout whose environments are made."""
    for name in (".quartet", "README.md", "deploy", "examples"):
        (tmp_path / name).symlink_to(first_hour.ROOT / name)
    seconds = first_hour.follow(tmp_path)
    print(f"{first_hour.PAGE.name} took {seconds:.0f} s")
    assert len(first_hour.own_files()) == 2 and seconds <= first_hour.MOST_SECONDS
    assert lift(tmp_path / "runs" / "mine") > 0.25
    assert (tmp_path / "runs" / "mine" / "learning_curve.png").is_file()


def test_shuffled_rewards_do_not_teach(tmp_path):
    folder, shuffled = tmp_path / "run", curve_runs.shuffled(tmp_path, seed=0)
    settings = {"run.id": "shuffled", "run.folder": folder, "run.max_steps": 40, "data.train": shuffled}
    words = [curve_runs.ENVIRONMENTS / "client/bin/quartet", "run", "examples/arithmetic/run.toml", "--plain"]
    for key, value in (settings | {"trainer.evaluation.interval": 20}).items():
        words += ["--set", f"{key}={value}"]
    done = subprocess.run(words, cwd=curve_runs.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lift(folder) < 0.08
