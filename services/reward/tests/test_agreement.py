"""`make agreement` on a small sample of our own: it measures, and it fails when a verdict is not the expected one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "tests" / "agreement" / "sample"
SECONDS = 120


def agreement(data: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.agreement.run", str(data), "--only", "math"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_the_sample_agrees():
    done = agreement(SAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted: gold 'x = 9', answer '9'" in done.stdout  # a real equality is listed
    assert "MISSED" not in done.stdout


def test_a_case_that_does_not_come_out_as_expected_fails(tmp_path):
    (tmp_path / "mathverify").mkdir()
    shutil.copy(SAMPLE / "mathverify" / "triples.jsonl", tmp_path / "mathverify")
    with (tmp_path / "mathverify" / "triples.jsonl").open("a", encoding="utf-8") as file:
        row = {"test": "test_number_extraction", "params": {"gold": "8", "pred": "The answer is 9.", "expected": 1}}
        file.write(json.dumps(row) + "\n")
    done = agreement(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "'8', 'The answer is 9.': not as expected" in done.stdout
    assert "missed: Math-Verify's cases, guarded, Math-Verify's cases, guards off" in done.stdout


def test_a_folder_without_data_is_said_to_be_one(tmp_path):
    done = agreement(tmp_path)
    assert done.returncode == 2
    assert "holds none of its data" in done.stdout
