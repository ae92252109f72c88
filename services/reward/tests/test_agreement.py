"""`make agreement` on a small sample of our own: it measures, and it fails when a verdict is not the expected one."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agreement import code, math, rows, run

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "tests" / "agreement" / "sample"
TRIPLES, HUMANEVAL = "mathverify/triples.jsonl", "humaneval/HumanEval.jsonl"


@pytest.fixture(scope="module")
def asker() -> Iterator[rows.Asker]:
    settings = ("reward.workers=2", "reward.deadline_seconds=20", "reward.sandbox.slots=4")
    with rows.reward_service(*settings) as asker:
        yield asker


@pytest.fixture
def agreement(monkeypatch, capsys, asker) -> Callable[[Path, str], tuple[int, str]]:
    """Measure one part in this process, with a service for all; return the exit status and what was printed."""
    for part in (code, math):
        monkeypatch.setattr(part, "reward_service", lambda *settings: contextlib.nullcontext(asker))

    def measure(data: Path, part: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["run.py", str(data), "--only", part])
        status = run.main()
        return status, capsys.readouterr().out

    return measure


@pytest.mark.parametrize(
    ("part", "listed", "count"), [("math", "accepted: gold 'x = 9', answer '9'", 1), ("code", " ok ", 8)]
)
def test_the_sample_agrees(agreement, part, listed, count):
    status, said = agreement(SAMPLE, part)
    assert status == 0, said
    assert said.count(listed) == count and "MISSED" not in said


@pytest.mark.parametrize(
    ("part", "file", "change", "words"),
    [
        (
            "math",
            TRIPLES,
            {"params": {"gold": "8", "pred": "The answer is 9.", "expected": 1}},
            ["'8', 'The answer is 9.': not as expected", "missed: Math-Verify's cases"],
        ),
        (
            "code",
            HUMANEVAL,
            {"canonical_solution": "    return 3\n"},
            ["sample/0: OUTCOME_INCORRECT: the assertion in line 3 of the test fails", "missed: HumanEval: references"],
        ),
    ],
)
def test_a_case_that_does_not_come_out_as_expected_fails(agreement, tmp_path, part, file, change, words):
    row = json.loads((SAMPLE / file).read_text().splitlines()[0])
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(json.dumps(row | change))
    status, said = agreement(tmp_path, part)
    assert status == 1, said
    assert all(each in said for each in words), said


def test_a_folder_without_data_is_said_to_be_one(agreement, tmp_path):
    status, said = agreement(tmp_path, "math")
    assert status == 2 and "holds none of its data" in said
