"""The program in a completion, and when two outputs or results are the same."""

import pytest

from quartet_reward.code.judged import same_output
from quartet_reward.code.tests import ProgramIn, Rules, find_program
from quartet_reward.code.values import plain, same

LAST, ANY, ALL = ProgramIn.LAST_PYTHON_FENCE, ProgramIn.LAST_FENCE, ProgramIn.COMPLETION


@pytest.mark.parametrize(
    ("completion", "place", "program"),
    [
        ("```python\na\n```", LAST, "a"),
        ("<think>```python\nno\n```</think>\n```python\nyes\n```\nIt is ```O(1)```.", LAST, "yes"),
        ("```python\ncut off", LAST, "cut off"),
        ("```\na\n```", LAST, None),
        ("a = 1", LAST, None),
        ("```py\nno\n```\n```\nyes\n```\ndone", ANY, "yes"),
        ("a = 1", ALL, "a = 1"),
    ],
)
def test_the_program_is_found(completion, place, program):
    found = find_program(completion, place)
    assert (found.strip() if found is not None else None) == program


@pytest.mark.parametrize(
    ("found", "expected", "how", "right"),
    [
        ("1 2\n3\n", "1 2\n3", {}, True),
        ("1 2  \r\n3\n\n\n", "1 2\n3", {}, True),
        ("1  2\n3", "1 2\n3", {}, False),
        ("1 2 3", "1\n2  3\n", {"compare": "tokens"}, True),
        ("0.3333334", "0.3333333", {"tolerance": 1e-6}, True),
        ("0.334", "0.333", {"tolerance": 1e-6}, False),
        ("nan", "1", {"tolerance": 1}, False),
        ("1 1", "1\n1", {"tolerance": 1}, False),
    ],
)
def test_outputs_are_compared(found, expected, how, right):
    assert same_output(found, expected, Rules(**how)) is right


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "right"),
    [
        ((1, (2,)), [1, [2]], 0, True),
        ({1: "a", None: 2}, {"1": "a", "null": 2}, 0, True),
        ([0.1 + 0.2], [0.3], 1e-9, True),
        (10**400, 1.5, 1e-9, False),
        ({1, 2}, [1, 2], 0, False),
    ],
)
def test_results_are_compared(found, expected, tolerance, right):
    assert same(plain(found), expected, tolerance) is right
