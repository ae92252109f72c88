"""`quartet compare`: the last values of runs, and the settings in which they differ."""

import json
from pathlib import Path

import pytest

from quartet_client.cli.main import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs in runs/, and one without a run file elsewhere."""
    monkeypatch.chdir(tmp_path)
    for name, settings, reward in (("slow", "learning_rate = 1e-5", 0.25), ("fast", 'algorithm = "rloo"', 0.75)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        own = f'[run]\nid = "{name}"\ngroup_size = 8\n[addresses]\nbroker = "{name}:1"\n[trainer]\n{settings}\n'
        (folder / "run.toml").write_text(own)
        steps = [
            {"kind": "step", "step": step, "time": 1.5, "reward/mean": at, "reward/close/mean": at / 2, "train/kl": 3}
            for step, at in enumerate((0.1, reward))
        ]
        held = {"kind": "evaluation", "set": "held", "policy_version": 2, "step": 2, "eval/held/ans_acc": 0.5}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*steps, held]))
    (tmp_path / "by-hand").mkdir()
    (tmp_path / "by-hand" / "metrics.jsonl").write_text(json.dumps({**steps[0], "reward/other/mean": -1.0}) + "\n")


def test_a_row_for_each_run_has_its_last_values_and_the_settings_that_differ(runs, capsys):
    Path("slow").mkdir()  # of the run file
    assert main(["compare", "slow", "runs/fast"]) == 0
    *headings, slow, fast = capsys.readouterr().out.splitlines()
    assert headings[-1].split() == ["run", "rate", "algorithm", "steps", "acc", "mean", "mean"]
    assert slow.split() == ["slow", "1e-05", "–", "2", "0.5", "0.125", "0.25"]
    assert fast.split() == ["fast", "–", "rloo", "2", "0.5", "0.375", "0.75"]


def test_a_narrow_terminal_loses_nothing_and_other_metrics_may_be_named(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["compare", "slow", "by-hand", "--metric", "train/kl"]) == 0
    *_, slow, by_hand = capsys.readouterr().out.splitlines()
    assert slow.split() == ["slow", "2", "0.5", "0.125", "0.25", "–", "3"]
    assert by_hand.split() == ["by-hand", "1", "–", "0.05", "0.1", "-1", "3"]
    assert main(["compare", "slow", "--metric", "train/lk"]) == 2
    assert "--metric: no run has 'train/lk'; allowed: eval/held/ans_acc, reward/close/mean" in capsys.readouterr().err


def test_for_programs_all_last_metrics_and_values_as_they_are(runs, capsys):
    assert main(["compare", "slow", "fast", "--json"]) == 0
    slow, fast = json.loads(capsys.readouterr().out)
    assert (slow["run"], slow["folder"], slow["steps"]) == ("slow", "runs/slow", 2)
    assert slow["settings"] == {"trainer.learning_rate": 1e-5, "trainer.algorithm": None}
    assert fast["metrics"] == {
        "reward/mean": 0.75, "reward/close/mean": 0.375, "train/kl": 3, "eval/held/ans_acc": 0.5,
    }  # fmt: skip


def test_compare_names_folders_that_are_no_run(runs, capsys):
    assert main(["compare", "slow", "gone"]) == 2
    assert "'runs/gone' is not the folder of a run with metrics" in capsys.readouterr().err
