"""The short learning test: forty steps lift held-out accuracy; the same steps with shuffled answers do not.

The control answers what a rising curve alone cannot: that it is the reward that teaches, not, say, sharper sampling.
"""

import json
import random
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".quartet" / "envs"
PREPARED = ROOT / ".quartet" / "arithmetic"
STEPS = 40

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def prepared() -> Path:
    """The demo's warmed-up model and data; made once, kept."""
    command = [
        ENVIRONMENTS / "trainer" / "bin" / "python",
        "-W",
        "ignore",
        ROOT / "examples/arithmetic/prepare.py",
        PREPARED,
    ]
    subprocess.run(command, check=True, timeout=300)
    return PREPARED


def held_out_accuracies(folder: Path, *overrides: str) -> list[float]:
    """Do a run and return its accuracy on the held-out problems at each evaluation."""
    words = [ENVIRONMENTS / "client" / "bin" / "quartet", "run", ROOT / "examples/arithmetic/run.toml", "--plain"]
    settings = [f"run.folder={folder}", f"run.max_steps={STEPS}", "trainer.evaluation.interval=20", *overrides]
    for setting in settings:
        words += ["--set", setting]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/heldout/ans_acc"] for row in rows if row["kind"] == "evaluation"]


def test_rewards_teach(prepared, tmp_path):
    accuracies = held_out_accuracies(tmp_path / "run", "run.id=learning")
    assert accuracies[-1] - accuracies[0] > 0.25, accuracies


def test_shuffled_rewards_do_not(prepared, tmp_path):
    problems = [json.loads(line) for line in (prepared / "train.jsonl").read_text().splitlines()]
    answers = [problem["gt_answer"] for problem in problems]
    random.Random(0).shuffle(answers)
    shuffled = tmp_path / "shuffled.jsonl"
    lines = (json.dumps({**problem, "gt_answer": other}) for problem, other in zip(problems, answers, strict=True))
    shuffled.write_text("\n".join(lines) + "\n")
    accuracies = held_out_accuracies(tmp_path / "run", "run.id=shuffled", f"data.train={shuffled}")
    assert accuracies[-1] - accuracies[0] < 0.08, accuracies
