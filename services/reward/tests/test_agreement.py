"""`make agreement` on a small sample of our own: it measures, and it fails when a verdict is not the expected one."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agreement import code, math, rows

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "tests" / "agreement" / "sample"


@pytest.fixture(scope="module")
def asker() -> Iterator[rows.Asker]:
    settings = ("reward.workers=1", "reward.deadline_seconds=20", "reward.sandbox.slots=4")
    with rows.reward_service(*settings) as asker:
        yield asker


@pytest.mark.parametrize(
    ("part", "file", "change", "missed"),
    [
        (
            math,
            "mathverify/triples.jsonl",
            {"params": {"gold": "8", "pred": "9", "expected": 1}},
            "Math-Verify's cases",
        ),
        (
            math,
            "verdicts/pairs.jsonl",
            {"accept": False},
            "Reported verdicts, not accepted falsely",
        ),
        (code, "humaneval/HumanEval.jsonl", {"canonical_solution": "    return 3\n"}, "HumanEval: references pass"),
    ],
)
def test_the_sample_agrees_and_a_case_that_does_not_fails(asker, monkeypatch, tmp_path, part, file, change, missed):
    monkeypatch.setattr(part, "reward_service", lambda *settings: contextlib.nullcontext(asker))
    measured = list(part.measure(SAMPLE))
    assert measured and all(row.passed for row in measured), measured
    line = json.loads((SAMPLE / file).read_text().splitlines()[0])
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(json.dumps(line | change))
    assert missed in "".join(row.name for row in part.measure(tmp_path) if not row.passed)
