"""The program in a completion, what a reference tests it with, and when two outputs or results are the same."""

import pytest
from quartet.v1 import reward_pb2

from quartet_reward.code.judged import same_output
from quartet_reward.code.tests import ProgramIn, Rules, find_program, read_tests
from quartet_reward.code.values import plain, same
from quartet_reward.errors import VerifierFailure

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


def reference(cases=(), **fields):
    return reward_pb2.Reference(test_cases=[reward_pb2.TestCase(input=a, output=b) for a, b in cases], **fields)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (reference(), "neither test_cases nor test_program"),
        (reference([("1", "2")], test_program="assert f()"), "one of them is allowed"),
        (reference([("1", "two")], entry_point="f"), r"test_cases\[0\].output: 'two' is no JSON"),
    ],
)
def test_a_reference_without_usable_tests_is_refused(bad, complaint):
    with pytest.raises(VerifierFailure, match=complaint) as caught:
        read_tests(bad)
    assert caught.value.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE


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
