"""How many tests a program passed, as the service says it: with programs that really run in the sandbox."""

import pytest
from quartet.v1 import reward_pb2
from reward_samples import spec

TIMEOUT = 120.0
SQUARES = [("[1]", "1"), ("[2]", "4"), ("[3]", "9")]
ADD_ONE = [("1\n", "2\n"), ("2\n", "3\n"), ("41\n", "42\n")]
CHECK = "def check(candidate):\n    assert candidate(3) == 9"


def item(program: str, cases=(), **reference) -> reward_pb2.ScoreItem:
    tests = [reward_pb2.TestCase(input=given, output=expected) for given, expected in cases]
    return reward_pb2.ScoreItem(
        item_id="a",
        completion=f"```python\n{program}\n```",
        reference=reward_pb2.Reference(test_cases=tests, **reference),
        verifiers=[spec("code", timeout_seconds=1.0)],
    )


@pytest.mark.parametrize(
    ("one", "tests", "passed"),
    [
        (item("print(int(input()) + 1)", ADD_ONE), 3, 3),
        (item("n = int(input())\nprint(n + 1 if n < 2 else n)", ADD_ONE), 3, 1),
        (item("n = int(input())\nprint(n + 1 if n < 9 else 1 / 0)", ADD_ONE), 3, 2),
        (item("print(", ADD_ONE), 3, 0),
        (item("def f(n): return n * n", SQUARES, entry_point="f"), 3, 3),
        (item("def f(n): return n * n if n < 3 else 0", SQUARES, entry_point="f"), 3, 2),
        (item("def f(n): return n * n if n < 2 else 1 / 0", SQUARES, entry_point="f"), 3, 1),
        (item("import os\ndef f(n): return n * n if n < 3 else os._exit(1)", SQUARES, entry_point="f"), 3, 2),
        (item("def f(n):\n    while n > 1: pass\n    return 1", SQUARES, entry_point="f"), 3, 1),
        (item("def f(n) return", SQUARES, entry_point="f"), 3, 0),
        (item("def f(n): return n * n", test_program=CHECK, entry_point="f"), 1, 1),
        (item("def f(n): return n + n", test_program=CHECK, entry_point="f"), 1, 0),
    ],
)
async def test_tests_that_passed_are_counted(service, one, tests, passed):
    response = await service.stub.Score(reward_pb2.ScoreRequest(items=[one]), timeout=TIMEOUT)
    (verifier,) = response.results[0].score.verifiers
    assert verifier.HasField("tests_passed"), verifier
    assert (verifier.tests, verifier.tests_passed) == (tests, passed)


async def test_a_verifier_without_tests_counts_none(service):
    one = reward_pb2.ScoreItem(
        item_id="a", completion="8", reference=reward_pb2.Reference(answer="8"), verifiers=[spec("exact")]
    )
    response = await service.stub.Score(reward_pb2.ScoreRequest(items=[one]), timeout=TIMEOUT)
    (verifier,) = response.results[0].score.verifiers
    assert verifier.tests == 0 and not verifier.HasField("tests_passed")
