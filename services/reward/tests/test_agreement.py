"""`make agreement` on a small sample of our own: it measures, and it fails when a verdict is not the expected one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "tests" / "agreement" / "sample"
TRIPLES, HUMANEVAL = "mathverify/triples.jsonl", "humaneval/HumanEval.jsonl"


def agreement(data: Path, part: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.agreement.run", str(data), "--only", part]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("part", "listed", "count"), [("math", "accepted: gold 'x = 9', answer '9'", 1), ("code", " ok ", 8)]
)
def test_the_sample_agrees(part, listed, count):
    done = agreement(SAMPLE, part)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(listed) == count and "MISSED" not in done.stdout


@pytest.mark.parametrize(
    ("part", "file", "change", "words"),
    [
        (
            "math",
            TRIPLES,
            {"params": {"gold": "8", "pred": "The answer is 9.", "expected": 1}},
            ["'8', 'The answer is 9.': not as expected", "missed: Math-Verify's cases, guarded, Math-Verify's cases"],
        ),
        (
            "code",
            HUMANEVAL,
            {"canonical_solution": "    return 3\n"},
            ["sample/0: OUTCOME_INCORRECT: the assertion in line 3 of the test fails", "missed: HumanEval: references"],
        ),
    ],
)
def test_a_case_that_does_not_come_out_as_expected_fails(tmp_path, part, file, change, words):
    row = json.loads((SAMPLE / file).read_text().splitlines()[0])
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(json.dumps(row | change))
    done = agreement(tmp_path, part)
    assert done.returncode == 1, done.stdout + done.stderr
    assert all(each in done.stdout for each in words), done.stdout


def test_a_folder_without_data_is_said_to_be_one(tmp_path):
    done = agreement(tmp_path, "math")
    assert done.returncode == 2
    assert "holds none of its data" in done.stdout
