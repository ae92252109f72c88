"""A dry run reads the references of the data as the verifiers of their prompts do, and names those of no use."""

import dataclasses
import json
from pathlib import Path

import pytest

from quartet_common.config import ConfigError, load_config
from quartet_reward import reference_check
from quartet_reward.config import RewardSection
from quartet_reward.preflight import preflight

SENTENCE = "The committee met on Tuesday and agreed to wait"
NUMBERS = [{"gt_answer": text} for text in ("72", 0.5, [3], r"\frac{1}{2}", r"x^2+\sin(x)", r"So it is \boxed{4}.")]
OUTPUTS = {"inputs": ["1\n"], "outputs": ["2\n"]}
CALLS = {"fn_name": "f", "inputs": ["1"], "outputs": ["two"]}


@pytest.fixture
def dry_run(tmp_path, caplog):
    """Return the errors, or else the warnings, of a dry run over rows."""

    def run(rows: list[dict], *verifiers: str | dict, **sets: list[dict]) -> list[str]:
        named = [{"name": one} if isinstance(one, str) else one for one in verifiers]
        settings = [f"run.verifiers={toml(named)}", f"data.train='{write(tmp_path / 'train.jsonl', rows)}'"]
        settings += [f"data.evaluation.{name}='{write(tmp_path / f'{name}.jsonl', own)}'" for name, own in sets.items()]
        config = load_config("reward", RewardSection, overrides=settings)
        caplog.clear()
        preflight(config)
        assert not caplog.messages, "only a dry run takes seconds"
        config = dataclasses.replace(config, dry_run=True)
        try:
            preflight(config)
            return [line.replace(f"{tmp_path}/", "") for line in caplog.messages]
        except ConfigError as error:
            return [f"error: {line}".replace(f"{tmp_path}/", "") for line in error.problems]

    return run


def toml(verifiers: list[dict]) -> str:
    tables = (", ".join(f"{key} = {value!r}" for key, value in one.items()) for one in verifiers)
    return f"[{', '.join(f'{{ {table} }}' for table in tables)}]"


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps({"prompt": "?", **row}) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("verifier", ["boxed", "math", "think_answer_tags"])
def test_references_that_are_mathematics_are_not_mentioned(dry_run, verifier):
    assert dry_run(NUMBERS, verifier, heldout=NUMBERS) == []


def test_a_source_of_texts_is_refused_with_the_share_and_the_cure(dry_run):
    (line,) = dry_run([{"gt_answer": f"{SENTENCE} {n * 'more '}"} for n in range(5)], "boxed", "length")
    assert line.startswith(
        "error: train.jsonl: 5 of 5 references are text, not mathematics, so that only the same text"
    )
    assert "the verifier 'exact'" in line and "`fields`" in line and "choices" in line
    assert f"train.jsonl, line 1: '{SENTENCE}'; train.jsonl, line 2: '{SENTENCE} more'; " in line
    assert line.endswith("; …") and "line 4" not in line


def test_some_texts_and_unusable_references_are_warnings_by_line(dry_run):
    rows = [*NUMBERS, {"gt_answer": SENTENCE}, {"gt_answer": r"\frac{1}{"}, {"gt_answer": "7"}]
    unusable, text = dry_run([{"gt_answer": "1"}], "math", heldout=rows)
    assert unusable.startswith("heldout.jsonl: 1 of 9 references is unusable, so that completions get no reward: ")
    assert "heldout.jsonl, line 8: " in unusable
    assert text.startswith("heldout.jsonl: 1 of 9 references is text, not mathematics")
    assert text.endswith(f"heldout.jsonl, line 7: '{SENTENCE}'")


def test_each_prompt_is_read_by_its_own_verifiers(dry_run):
    rows = [{"gt_answer": SENTENCE, "verifiers": ["exact"]}, {"gt_answer": SENTENCE, "verifiers": ["boxed", "exact"]}]
    (line,) = dry_run([*rows, {"gt_answer": "3"}], "boxed")
    assert line.startswith("train.jsonl: 1 of 2 references is text") and line.endswith(f"line 2: '{SENTENCE}'")
    assert dry_run(rows[:1], "boxed") == []


def test_texts_that_another_verifier_judges_are_no_error(dry_run):
    (line,) = dry_run([{"gt_answer": SENTENCE}], "boxed", {"name": "exact", "weight": 0.5})
    assert line.startswith("train.jsonl: 1 of 1 references is text")


def test_tests_that_cannot_be_used_are_named(dry_run):
    assert dry_run([{"test_cases": OUTPUTS}, {"test_cases": json.dumps(OUTPUTS)}], "code") == []
    (line,) = dry_run([{"test_cases": OUTPUTS}, {"test_cases": CALLS}, {"gt_answer": "3"}], "code")
    assert line.startswith("train.jsonl: 2 of 3 references are unusable")
    assert "line 2: reference.test_cases[0].output: 'two' is not JSON" in line
    assert "line 3: reference has neither test_cases nor test_program" in line
    (line,) = dry_run([{"test_cases": CALLS}], "code")
    assert line.startswith("error: train.jsonl: 1 of 1 references is unusable")


def test_many_references_for_a_worker_are_sampled(dry_run, monkeypatch):
    monkeypatch.setattr(reference_check, "_ASKED", 4)
    rows = [{"gt_answer": rf"\frac{{1}}{{{n}"} for n in range(40)]
    (line,) = dry_run([{"gt_answer": "1"}, *rows], "math")
    assert line.startswith("train.jsonl: 4 of 5 references (a sample) are unusable")


def test_a_row_whose_programs_are_run_has_the_sandbox_checked(tmp_path):
    def plan(verifier: str) -> dict:
        train = write(tmp_path / "train.jsonl", [{"tests": OUTPUTS, "verifiers": [verifier]}])
        return preflight(load_config("reward", RewardSection, overrides=[f"data.train='{train}'"]))

    assert "sandbox" in plan("code") and "sandbox" not in plan("exact")
