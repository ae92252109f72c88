"""The code part of `make agreement` on a small sample of our own: it measures, and it fails when a reference does."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "tests" / "agreement" / "sample"
SECONDS = 120


def agreement(data: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.agreement.run", str(data), "--only", "code"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_the_sample_agrees():
    done = agreement(SAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 8
    assert "MISSED" not in done.stdout


def test_a_reference_that_fails_is_named(tmp_path):
    (tmp_path / "humaneval").mkdir()
    row = json.loads((SAMPLE / "humaneval" / "HumanEval.jsonl").read_text().splitlines()[0])
    row["canonical_solution"] = "    return 3\n"
    (tmp_path / "humaneval" / "HumanEval.jsonl").write_text(json.dumps(row))
    done = agreement(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "sample/0: OUTCOME_INCORRECT: the assertion in line 3 of the test fails" in done.stdout
    assert "missed: HumanEval: references pass" in done.stdout
