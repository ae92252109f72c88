"""The verifier `code`, with programs that really run in the sandbox."""

import pytest
from pydantic import ValidationError
from quartet.v1 import reward_pb2
from reward_samples import judged
from reward_samples import program as item

from quartet_reward.errors import VerifierFailure
from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.verifiers.code import CodeParameters

CORRECT, INCORRECT = reward_pb2.OUTCOME_CORRECT, reward_pb2.OUTCOME_INCORRECT
MALFORMED, TIMED_OUT = reward_pb2.OUTCOME_MALFORMED, reward_pb2.OUTCOME_TIMED_OUT
EXCEEDED, NOT_COMPILED = reward_pb2.OUTCOME_RESOURCE_EXCEEDED, reward_pb2.OUTCOME_COMPILE_ERROR
RAISED = reward_pb2.OUTCOME_RUNTIME_ERROR
BAD = None  # the reference is

SQUARE = "def square(n):\n    return n * n"
SQUARE_TEST = "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(-1) == 1"
UNITTEST = """
import unittest

class TestSquare(unittest.TestCase):
    def test_two(self):
        self.assertEqual(square(2), 4)

if __name__ == "__main__":
    unittest.main()
"""
ADD_ONE = [("1\n", "2\n"), ("41", "42")]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def limit(source: str) -> dict[str, float]:
    """Little time for what is endless and has nothing to do before; else what is usual, which a busy machine needs."""
    return {"timeout_seconds": 1.0} if "while True: pass" in source else {}


async def bad_reference(sandbox, one, complaint, **parameters):
    with pytest.raises(VerifierFailure, match=complaint) as caught:
        await judged(sandbox, one, **parameters)
    assert caught.value.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE


@pytest.mark.parametrize(
    ("program", "outcome", "reason"),
    [
        ("print(int(input()) + 1)", CORRECT, "all 2 cases are right"),
        ("print(", NOT_COMPILED, "case 1 of 2: SyntaxError"),
        ("print(2)\n1 / 0", RAISED, "ZeroDivisionError"),
        ("while True: pass", TIMED_OUT, "killed after"),
        ("a = bytearray(1 << 30)", EXCEEDED, "memory"),
        ("while True: print('x' * 10000)", EXCEEDED, "printed more"),
    ],
)
async def test_programs_that_read_standard_input(sandbox, program, outcome, reason):
    verdict = await judged(sandbox, item(program, ADD_ONE), **limit(program))
    assert (verdict.outcome, reason in verdict.reason) == (outcome, True), verdict
    assert verdict.reward == (1.0 if outcome == CORRECT else 0.0)
    assert verdict.ans_acc == verdict.reward
    assert verdict.format_acc == 1.0
    assert verdict.parsed_answer == program


SQUARES = {"cases": [("[1]", "1"), ("[2]", "4"), ("[3]", "9")], "entry_point": "f"}
CHECK = {"test_program": "def check(candidate):\n    assert candidate(3) == 9", "entry_point": "f"}


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        ("n = int(input())\nprint(n + 1 if n < 2 else n)", {"cases": ADD_ONE}, 1),
        ("import os\ndef f(n): return n * n if n < 3 else os._exit(1)", SQUARES, 2),
        ("def f(n):\n    while n > 1: pass\n    return 1", SQUARES, 1),
        ("def f(n): return n + n", CHECK, 0),
    ],
)
async def test_tests_that_passed_are_counted(sandbox, program, tests, passed):
    verdict = await judged(sandbox, item(program, **tests), timeout_seconds=2.0 if "while" in program else 10.0)
    assert (verdict.tests, verdict.tests_passed) == (len(tests.get("cases", "1")), passed)


@pytest.mark.parametrize(
    ("program", "outcome", "reason"),
    [
        (SQUARE, CORRECT, "every test passed"),
        ("def square(n):\n    return n + n", INCORRECT, "the assertion in line 2 of the test fails"),
        ("def square(n):\n    return (", NOT_COMPILED, "SyntaxError"),
        ("def square(n):\n    raise ValueError('no')", RAISED, "the program raised ValueError: no in line 2"),
        ("def other(n):\n    return n", RAISED, "does not define 'square'"),
        ("def square(n):\n    while True: pass", TIMED_OUT, "did not answer in time"),
        ("def square(n):\n    return 'a' * (1 << 31)", EXCEEDED, "out of memory"),
        ("square = 9", INCORRECT, "TypeError"),
    ],
)
async def test_assert_style_tests(sandbox, program, outcome, reason):
    one = item(program, test_program=SQUARE_TEST, entry_point="square")
    verdict = await judged(sandbox, one, **limit(program))
    assert (verdict.outcome, reason in verdict.reason) == (outcome, True), verdict


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (SQUARE, "assert square(2) == 4\nassert [square(n) for n in range(3)] == [0, 1, 4]"),
        (SQUARE, "def test_two():\n    assert square(2) == 4\n\ndef test_three():\n    assert square(3) == 9"),
        (SQUARE, UNITTEST),
        ("def order(items):\n    items.sort()", "items = [2, 1]\nassert order(items) is None\nassert items == [1, 2]"),
        (
            "def one(a, b):\n    a[0] = True\n    b['a'] = [a]\n    return a",
            "a, b = [1], {}\nassert one(a, b) is a is b['a'][0] and a[0] is True",
        ),
        ("def fail(n):\n    raise KeyError(n)", "try:\n    fail(1)\n    assert False\nexcept KeyError:\n    pass"),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def __len__(self): return len(self.items)",
            "stack = Stack()\nstack.push(3)\nassert stack.items == [3]\nassert len(stack) == 1",
        ),
        ("def twice(f):\n    return lambda x: f(f(x))", "assert twice(lambda x: x + 3)(1) == 7"),
    ],
)
async def test_tests_of_every_kind_find_what_they_test(sandbox, program, test):
    verdict = await judged(sandbox, item(program, test_program=test))
    assert verdict.outcome == CORRECT, verdict.reason


async def test_a_program_cannot_put_its_own_names_in_the_place_of_the_tests(sandbox):
    program = (
        "def square(n): return -1\ndef isclose(*a): return True\nabs = len = isclose\nclass math: isclose = isclose"
    )
    for test in ("assert isclose(square(2), 4)", "assert math.isclose(square(2), 4)", "assert abs(square(2)) == 4"):
        verdict = await judged(sandbox, item(program, test_program=test))
        assert verdict.outcome == INCORRECT, (test, verdict)


STACK = "class Stack(list):\n    push = list.append\nclass Box:\n    def __init__(self): self.items = []"


@pytest.mark.parametrize(
    ("program", "entry_point", "test", "outcome", "reason"),
    [
        ("def f(g): return g(1)", "f", "assert f(lambda n: n + 1) == 2", CORRECT, ""),
        (STACK, "Stack", "def check(c):\n    assert c([1]) == [1]", CORRECT, ""),
        (STACK, "Box", "def check(c):\n    assert c().items == []", INCORRECT, "'OpaqueObject' object has no"),
        ("def g(): return 4", "f", "def check(c):\n    assert g() == 4 and c() == 4", BAD, "the test uses g, and"),
        ("def f(n): return n", "f", "assert f(n) == m", BAD, "the test uses m and n, and of the program only f"),
        ("def f(n): return n", "f", "class A: pass\nassert f(1) == 1 and f(A())", BAD, "an object of A; strict mode"),
    ],
)
async def test_a_strict_test_gets_plain_data_of_one_function(sandbox, program, entry_point, test, outcome, reason):
    one = item(program, test_program=test, entry_point=entry_point)
    if outcome is BAD:
        await bad_reference(sandbox, one, reason)
    else:
        verdict = await judged(sandbox, one)
        assert (verdict.outcome, reason in verdict.reason) == (outcome, True), verdict


async def test_a_test_that_is_not_strict_asks_objects_and_uses_every_name(sandbox):
    one = item(STACK, test_program="assert Stack([1]) == [1] and Box().items == []", entry_point="Stack")
    assert (await judged(sandbox, one, strict=False)).outcome == CORRECT


@pytest.mark.parametrize(
    ("prefix", "wrong"),
    [
        ("def twice(n):\n    return 2 * n\n\ndef half(n):\n    'Half of n'\n", ""),
        ("def add(a, b):\n    return a * b\ntwice = lambda n: add(n, 2)\ndef half(n):\n", ""),
        ("def half(n):\n    'Half of n'\n", "the test uses twice, and of the program only half"),
        ("import nothing_like_it\ndef half(n):\n", "`prefix`, of which the test may use add and twice, fails: Module"),
    ],
)
async def test_helpers_of_a_strict_test_are_the_prefixs(sandbox, prefix, wrong):
    test = "def check(candidate):\n    assert candidate(twice(4)) == 4 and add(1, 3) in (3, 4)"
    one = item("    return n // 2\ntwice = None", test_program=test, entry_point="half")
    if wrong:
        await bad_reference(sandbox, one, wrong, prefix=prefix)
    else:
        assert (await judged(sandbox, one, prefix=prefix)).outcome == CORRECT


@pytest.mark.parametrize(
    ("test", "complaint"),
    [
        ("assert (", "does not compile"),
        ("assert 1 == 2", "before it called the program"),
        ("import no_such_module", "before it called the program, the test ended with ModuleNotFoundError"),
        ("while True: pass", "before it asked the program anything"),
    ],
)
async def test_a_test_that_is_broken_is_a_bad_reference(sandbox, test, complaint):
    await bad_reference(sandbox, item(SQUARE, test_program=test), complaint, **limit(test))


@pytest.mark.parametrize(
    ("program", "cases", "parameters", "outcome"),
    [
        ("def add(a, b): return a + b", [("[1, 2]", "3"), ("[2, 2]", "4")], {}, CORRECT),
        ("def add(a, b): return a * b", [("[2, 2]", "4"), ("[1, 2]", "3")], {}, INCORRECT),
        ("class Solution:\n    def add(self, a: int, b: int): return a + b", [("[1, 2]", "3")], {}, CORRECT),
        ("class Solution:\n    def add(self, x: List[int]): return sum(x)", [("[[1, 2]]", "3")], {}, CORRECT),
        ("def add(x): return sum(x)", [("[1, 2]", "3"), ("[4, 5, 6]", "15")], {}, CORRECT),
        ("def add(x): return x", [("[1]", "[1]")], {"arguments": "lines"}, CORRECT),
        ("def add(x): return 0.1 + 0.2", [("1", "0.3")], {"tolerance": 1e-9}, CORRECT),
        ("def add(x):\n    while x: pass", [("0", "null"), ("1", "null")], {"timeout_seconds": 0.5}, TIMED_OUT),
    ],
)
async def test_cases_of_a_function(sandbox, program, cases, parameters, outcome):
    verdict = await judged(sandbox, item(program, cases, entry_point="add"), **parameters)
    assert verdict.outcome == outcome, verdict


LEETCODE = (
    "class Solution:\n    def total(self, nums: List[int], most: Optional[float] = inf) -> int:\n"
    "        return reduce(add, accumulate(takewhile(lambda each: each < min(most, sys.maxsize), nums)), gcd(0, 0))\n"
)


async def test_every_program_that_is_called_finds_the_usual_names(sandbox):
    styles = (
        {"entry_point": "Solution().total", "test_program": "def check(f):\n    assert f(nums=[1, 2]) == 4"},
        {"test_program": "assert Solution().total([1, 2]) == 4"},
        {"entry_point": "total", "cases": [("[[1, 2]]", "4")]},
    )
    for style in styles:
        assert (await judged(sandbox, item(LEETCODE, **style))).outcome == CORRECT, style
    undefined = item("'I define nothing.'", entry_point="gcd", cases=[("[12, 18]", "6")])
    assert (await judged(sandbox, undefined)).outcome == RAISED, "the usual names are not the program's"


ANY_DIVISOR = "def check(input, output, expected):\n    return int(input) % int(output) == 0 and int(output) > 1"


async def test_a_checker_program_decides(sandbox):
    for printed, outcome in (("3", CORRECT), ("5", INCORRECT), ("many", INCORRECT)):
        verdict = await judged(sandbox, item(f"print({printed!r})", [("12", "2")]), checker=ANY_DIVISOR)
        assert verdict.outcome == outcome, verdict


@pytest.mark.parametrize(
    ("checker", "complaint"),
    [
        ("def check(", "the checker program fails"),
        ("def check(input, output, expected): return False", "does not accept the expected answer"),
        ("def check(input, output, expected): return 1", "must return a bool"),
    ],
)
async def test_a_checker_that_is_broken_is_a_bad_reference(sandbox, checker, complaint):
    await bad_reference(sandbox, item("print(1)", [("1", "1")]), complaint, checker=checker)


async def test_what_needs_no_sandbox_is_said_without_one():
    no_program = reward_pb2.ScoreItem(completion="I give up.", reference=item("", ADD_ONE).reference)
    assert (await judged(None, no_program)).outcome == MALFORMED
    assert (await judged(None, no_program)).format_acc == 0.0
    assert (await judged(None, item("print('\0')", ADD_ONE))).outcome == NOT_COMPILED
    assert (await judged(None, item("#" * (1 << 20), ADD_ONE))).outcome == EXCEEDED


class Absent:
    """A sandbox that cannot run anything."""

    async def run(self, job):
        raise SandboxUnavailable("out of order")


@pytest.mark.parametrize("sandbox", [None, Absent()])
async def test_without_a_sandbox_there_is_no_verdict(sandbox):
    with pytest.raises(VerifierFailure) as caught:
        await judged(sandbox, item(SQUARE, ADD_ONE))
    assert caught.value.kind == reward_pb2.FAILURE_KIND_SANDBOX_UNAVAILABLE
    assert caught.value.retryable


async def test_a_checker_decides_alone():
    with pytest.raises(ValidationError, match="a checker decides alone; got tolerance"):
        CodeParameters(checker=ANY_DIVISOR, tolerance=0.1)
