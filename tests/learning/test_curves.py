"""The program of the learning curves, without runs: stored results and requirements."""

import json
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import curve_report
import curve_runs
import pytest
from curve_cases import CASES, MIXTURE

GRPO = next(case for case in CASES if case.name == "grpo")


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> Path:
    """A folder in place of the warmed-up model, whose content these tests do not need."""
    folder = tmp_path / "arithmetic"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "recipe.txt").write_text("one recipe")
    monkeypatch.setattr(curve_runs, "PREPARED", folder)
    return folder


def result(seed: int, first: float, last: float) -> curve_runs.Result:
    digest, evaluations = curve_runs.digest(GRPO, seed), [(0, first), (40, last)]
    return curve_runs.Result("grpo", seed, digest, 40, evaluations, 1.0, 20.0)


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


def test_a_run_without_its_evaluations_is_no_result(prepared, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"kind": "evaluation", "step": 0, "eval/heldout/ans_acc": 0.2}) + "\n")
    with pytest.raises(curve_runs.RunFailed, match=r"evaluations at \[0\] of 0 steps"):
        curve_runs.read(metrics, GRPO, 1, 10.0)


def test_the_section_takes_the_place_of_the_one_before_and_of_nothing_else(prepared, tmp_path, monkeypatch):
    page = tmp_path / "RESULTS.md"
    page.write_text("# Benchmarks\n\n| a | b |\n\n## Learning curves\n\nold\n\n## Another\n\nkept\n")
    monkeypatch.setattr(curve_report, "PAGE", page)
    monkeypatch.setattr(curve_report, "draw", lambda *_: None)
    curve_report.write([(GRPO, result(1, 0.2, 0.5)), (GRPO, result(2, 0.1, 0.6))])
    text = page.read_text()
    assert text.startswith("# Benchmarks\n\n| a | b |\n") and "## Another\n\nkept\n" in text and "old" not in text
    assert "| grpo | 2     | 10–20%                         | 50–60%     | +30, +50      | 1.0       |" in text


def test_a_run_is_compared_with_its_control_by_the_tokens_until_the_same_accuracy(prepared):
    case = next(case for case in CASES if case.control)
    control = next(each for each in CASES if each.name == case.control)
    tokens = [(0, 0), (20, 500), (40, 1000)]
    whole = replace(result(1, 0.2, 0.5), tokens=[(0, 0), (40, 1000)])
    fast = replace(whole, evaluations=[(0, 0.2), (20, 0.5), (40, 0.6)], tokens=tokens)
    slow = replace(fast, evaluations=[(0, 0.2), (20, 0.4), (40, 0.5)])
    never = replace(fast, evaluations=[(0, 0.2), (20, 0.4), (40, 0.4)])
    for run, holds, words in (
        (fast, True, "→ 500, 50%"),
        (slow, False, "→ 1,000, 100%"),
        (never, False, "not reached"),
    ):
        (one,) = curve_report.compared([(control, whole), (case, run)])
        assert one.holds is holds and one.line.endswith(words)
    assert curve_report.compared([(case, fast)]) == []
    assert curve_report.token_table([(GRPO, whole)]) == ""


def test_the_mixture_is_three_disjoint_thirds(prepared, tmp_path):
    rows = [json.dumps({"id": f"p{n}", "prompt": f"{n}=?", "gt_answer": str(n)}) for n in range(9)]
    (prepared / "train.jsonl").write_text("\n".join(rows) + "\n")
    sources = tomllib.loads(f"train = {curve_runs.mixed(tmp_path)}")["train"]
    files = [Path(source["path"]) for source in sources]
    assert {file.stem: source["weight"] for file, source in zip(files, sources, strict=True)} == MIXTURE
    problems = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert sorted(each["id"] for third in problems for each in third) == [f"p{n}" for n in range(9)]
    assert {each["gt_answer"] for each in problems[2]} == {"100"}
