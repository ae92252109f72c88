"""The examples in the table of docs/math.md have the verdicts that it gives them."""

import re
from pathlib import Path

import pytest

from quartet_reward.math.choices import paired
from quartet_reward.math.compare import STRICT
from quartet_reward.math.worker import compare, judge_reference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "math.md"
TABLE = PAGE.read_text().partition("### The rules, by example")[2].partition("###")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| ")]


def examples(cell: str) -> list[str]:
    return [part.strip()[1:-1] for part in re.split(r"\s;\s", cell)]


def same(answer: str, reference: str) -> bool:
    answer, reference = paired(answer, reference)
    return compare(reference, answer, STRICT)


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row[1])
def test_the_rules_of_the_page_hold(row):
    _, (reference,), right, wrong = (row[0], *map(examples, row[1:]))
    judge_reference(reference, STRICT)
    assert [answer for answer in right if not same(answer, reference)] == []
    assert [answer for answer in wrong if same(answer, reference)] == []
