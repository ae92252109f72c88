"""Rewards per verifier, of two functions that are always equal, in whatever a run writes and says."""

import json
import signal
from pathlib import Path

import pytest
from launched import ENDLESS
from test_runs import ENDED, READY

pytestmark = pytest.mark.timeout(600)

FUNCTIONS = """
from quartet_reward import Score

def close(completion, solution):
    return Score(0.25, correct=len(completion) % 2 == 0, reason=f"not {solution}")

def fixed(completion):
    return 0.5
"""


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Of a run whose verifiers read the column `solution`, in rows that have another reference answer."""
    functions, rows = tmp_path / "rewards.py", tmp_path / "rows.jsonl"
    functions.write_text(FUNCTIONS)
    row = {"prompt": "2+3=?", "gt_answer": "nobody reads it", "solution": "the column"}
    rows.write_text("".join(json.dumps({**row, "id": f"p{number}"}) + "\n" for number in range(8)))
    verifiers = f'run.verifiers=[{{file="{functions}:close", weight=2.0}}, {{file="{functions}:fixed"}}]'
    data = [f"data.train={rows}", f"data.evaluation.held={rows}", "data.passes=0"]
    often = ["trainer.samples_interval=1", "trainer.rollout_log_interval=1", "trainer.evaluation.interval=1000"]
    best = ["trainer.checkpoint.best_metric=eval/held/reward/close/mean"]
    return [verifiers, *data, *often, *best]


def test_each_verifier_has_its_name_in_what_a_run_writes_and_says(launch, run_file, settings, tmp_path):
    running = launch(run_file, *ENDLESS, *(part for setting in settings for part in ("--set", setting)))
    running.wait_for_line("warning: rewards: every reward is 1, so that nothing is learned", READY)

    status = launch("--config", tmp_path / "run" / "run.toml", command=("status",))
    status.wait(60)  # its status depends on whether the reward service has loaded what no verifier here needs
    words = " ".join(status.said().split())
    assert "warning: rewards: every reward is 1, so that nothing is learned:" in words, words
    assert "try completions with quartet score" in words

    evaluated = launch("launched", "held", "--config", tmp_path / "run" / "run.toml", command=("eval",))
    assert evaluated.wait(120) == 0, evaluated.said()
    assert " by close (95%: " in evaluated.said(), evaluated.said()
    assert "reward 1.000 (close 0.250, fixed 0.500) over 8 prompts" in evaluated.said()

    running.send_signal(signal.SIGINT)
    assert running.wait(ENDED) == 130, running.said()
    (line, *_) = (line for line in running.said().splitlines() if line.startswith("step 1/"))
    assert "  reward 1.000  accuracy by close " in line
    (line, *_) = (line for line in running.said().splitlines() if line.startswith("evaluation held at version 0: "))
    assert " by close (95%: " in line and line.endswith("  reward 1.000 (close 0.250, fixed 0.500)")

    folder = tmp_path / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (held, *_), (step, *_) = ([row for row in rows if row["kind"] == kind] for kind in ("evaluation", "step"))
    for metrics, prefix in ((step, ""), (held, "eval/held/")):
        assert metrics[f"{prefix}reward/close/mean"] == 0.25 and metrics[f"{prefix}reward/fixed/mean"] == 0.5
        accuracy = metrics["reward/ans_acc" if not prefix else "eval/held/ans_acc"]
        assert metrics[f"{prefix}reward/close/ans_acc"] == pytest.approx(accuracy)
        assert f"{prefix}reward/fixed/ans_acc" not in metrics
    (events,) = (folder / "tensorboard").iterdir()
    assert b"eval/held/reward/close/mean" in events.read_bytes()

    first = json.loads((folder / "rollouts.jsonl").read_text().splitlines()[0])
    close, fixed = first["scores"][0].pop("verifiers")
    assert first["scores"][0]["reward"] == 1 and first["scores"][0]["references"] == {"solution": "the column"}
    assert (close["reward"], close["weight"], close["reason"]) == (0.25, 2, "not the column")
    assert fixed["name"].endswith("rewards.py:fixed") and (fixed["weight"], fixed["outcome"]) == (1, "unjudged")
    (sample, *_) = sorted((folder / "samples").iterdir())
    text = sample.read_text()
    assert "Reference solution: `the column`" in text and "nobody reads it" not in text
    assert "rewards.py:close: reward 0.25 × weight 2, " in text
    assert "rewards.py:fixed: reward 0.5 × weight 1, unjudged\n" in text
    (line, *_) = (folder / "evaluations" / "held-step-0.jsonl").read_text().splitlines()
    assert json.loads(line)["gold"] == "the column" and len(json.loads(line)["verifiers"]) == 2
