"""The program of the learning curves, without runs: what it keeps, what it judges, what it writes."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import curve_report
import curve_runs
import pytest
from curve_cases import CASES

GRPO = next(case for case in CASES if case.name == "grpo")
SHUFFLED = next(case for case in CASES if case.shuffled)


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> Path:
    """A folder like that of the warmed-up model, whose content no run of these tests needs."""
    folder = tmp_path / "arithmetic"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "recipe.txt").write_text("one recipe")
    problems = [{"id": str(number), "prompt": f"{number}=?", "gt_answer": str(number)} for number in range(50)]
    (folder / "train.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    monkeypatch.setattr(curve_runs, "PREPARED", folder)
    return folder


def result(seed: int, first: float, last: float, case=GRPO) -> curve_runs.Result:
    return curve_runs.Result(
        case=case.name,
        seed=seed,
        digest=curve_runs.digest(case, seed),
        settings=list(case.settings),
        steps=40,
        evaluations=[(0, first), (40, last)],
        reward=[0.1] * 40,
        length=[12.0] * 40,
        staleness=1.0,
        log_prob_diff=0.001,
        training_seconds=12.0,
        seconds=20.0,
    )


def test_a_result_counts_only_for_the_settings_model_and_seed_it_was_made_with(prepared, tmp_path):
    done = result(1, 0.2, 0.6)
    place = curve_runs.folder_of(tmp_path, GRPO, 1)
    place.mkdir()
    (place / "result.json").write_text(json.dumps(asdict(done)))
    assert curve_runs.kept(tmp_path, GRPO, 1).lift == done.lift
    assert curve_runs.kept(tmp_path, GRPO, 2) is None
    assert curve_runs.kept(tmp_path, replace(GRPO, settings=("trainer.algorithm=rloo",)), 1) is None
    (prepared / "model" / "recipe.txt").write_text("another recipe")
    assert curve_runs.kept(tmp_path, GRPO, 1) is None


def test_shuffled_answers_are_the_same_answers_at_other_problems(prepared, tmp_path):
    rows = [json.loads(line) for line in curve_runs.shuffled(tmp_path, 1).read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [f"{number}=?" for number in range(50)]
    answers = [row["gt_answer"] for row in rows]
    assert sorted(answers, key=int) == [str(number) for number in range(50)]
    assert sum(row["gt_answer"] == row["id"] for row in rows) < 10


def test_bars_are_of_what_a_run_gained(prepared):
    assert GRPO.holds(result(1, 0.18, 0.38).lift)
    assert not GRPO.holds(result(1, 0.18, 0.37).lift)
    assert SHUFFLED.holds(result(1, 0.18, 0.10).lift)
    assert not SHUFFLED.holds(result(1, 0.18, 0.27).lift)


def test_the_section_takes_the_place_of_the_one_before_and_of_nothing_else(prepared, tmp_path, monkeypatch):
    page = tmp_path / "RESULTS.md"
    page.write_text("# Benchmarks\n\n| a | b |\n\n## Learning curves\n\nold\n\n## Another\n\nkept\n")
    monkeypatch.setattr(curve_report, "PAGE", page)
    monkeypatch.setattr(curve_report, "draw", lambda *_: None)
    for last in (0.5, 0.6):
        curve_report.write([(GRPO, result(1, 0.2, last)), (GRPO, result(2, 0.1, last))])
    text = page.read_text()
    assert text.startswith("# Benchmarks\n\n| a | b |\n")
    assert "## Another\n\nkept\n" in text
    assert text.count("## Learning curves") == 1
    assert "old" not in text
    assert "| grpo | 2     | 10–20%                         | 60%        | +40, +50      | 1.0       |" in text


def test_a_run_without_its_evaluations_is_no_result(prepared, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"kind": "evaluation", "step": 0, "eval/heldout/ans_acc": 0.2}) + "\n")
    with pytest.raises(curve_runs.RunFailed, match=r"evaluations at \[0\] of 0 steps"):
        curve_runs.read(metrics, GRPO, 1, 10.0)
