"""What becomes of a program under tests of every kind. Programs really run in the sandbox.

Whatever a program returns, raises or prints is an outcome of that program; a failure would be so with any other.
"""

import pytest
from pydantic import ValidationError
from quartet.v1 import reward_pb2
from reward_samples import judged, program

from quartet_reward import metrics
from quartet_reward.sandbox.api import SandboxUnavailable
from quartet_reward.verifiers.code import CodeParameters

pytestmark = pytest.mark.asyncio(loop_scope="module")


SHORT = {"timeout_seconds": 1.0}  # for what is endless and has nothing to do before
ADD_ONE = {"cases": [("1\n", "2\n"), ("41", "42")]}
OUTPUTS = [
    ("print(int(input()) + 1)", ADD_ONE, {}, "correct", "all 2 cases are right"),
    ("print(", ADD_ONE, {}, "compile_error", "case 1 of 2: SyntaxError"),
    ("print(2)\n1 / 0", ADD_ONE, {}, "runtime_error", "ZeroDivisionError"),
    ("while True: pass", ADD_ONE, SHORT, "timed_out", "killed after"),
    ("a = bytearray(1 << 30)", ADD_ONE, {}, "resource_exceeded", "memory"),
    ("while True: print('x' * 10000)", ADD_ONE, {}, "resource_exceeded", "printed more"),
]

SQUARE = "def square(n):\n    return n * n"
CHECK_SQUARE = {
    "test_program": "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(-1) == 1",
    "entry_point": "square",
}
UNITTEST = """
import unittest

class TestSquare(unittest.TestCase):
    def test_two(self):
        self.assertEqual(square(2), 4)

if __name__ == "__main__":
    unittest.main()
"""


def under(source: str, entry_point: str = "") -> dict[str, str]:
    return {"test_program": source, "entry_point": entry_point}


ASSERTIONS = [
    (SQUARE, CHECK_SQUARE, {}, "correct", "every test passed"),
    ("def square(n):\n    return n + n", CHECK_SQUARE, {}, "incorrect", "the assertion in line 2 of the test fails"),
    ("def square(n):\n    return (", CHECK_SQUARE, {}, "compile_error", "SyntaxError"),
    ("def square(n):\n    raise ValueError('no')", CHECK_SQUARE, {}, "runtime_error",
     "the program raised ValueError: no in line 2"),
    ("def other(n):\n    return n", CHECK_SQUARE, {}, "runtime_error", "does not define 'square'"),
    ("def square(n):\n    while True: pass", CHECK_SQUARE, SHORT, "timed_out", "did not answer in time"),
    ("def square(n):\n    return 'a' * (1 << 31)", CHECK_SQUARE, {}, "resource_exceeded", "out of memory"),
    ("square = 9", CHECK_SQUARE, {}, "incorrect", "TypeError"),
    # A program's coroutine runs when it is called.
    *((f"async def square(n):\n    {body}", under(f"import asyncio\n{test}", entry_point), {}, outcome, says)
      for entry_point in ("", "square")
      for body, test, outcome, says in (
          ("return n * n", "async def test_two():\n    assert await square(2) == 4", "correct", ""),
          ("return n * n", "assert asyncio.run(square(2)) == 4", "correct", ""),
          ("await __import__('asyncio').sleep(0)\n    return n", "assert asyncio.run(square(2)) == 4", "incorrect", ""),
          ("raise KeyError(n)", "assert asyncio.run(square(2)) == 4", "runtime_error", "KeyError"),
      )),
    # Tests of every kind find what they test.
    (SQUARE, under("assert square(2) == 4\nassert [square(n) for n in range(3)] == [0, 1, 4]"), {}, "correct", ""),
    (SQUARE, under("def test_two():\n    assert square(2) == 4\n\ndef test_three():\n    assert square(3) == 9"), {},
     "correct", ""),
    (SQUARE, under(UNITTEST), {}, "correct", ""),
    ("def order(items):\n    items.sort()",
     under("items = [2, 1]\nassert order(items) is None\nassert items == [1, 2]"), {}, "correct", ""),
    ("def one(a, b):\n    a[0] = True\n    b['a'] = [a]\n    return a",
     under("a, b = [1], {}\nassert one(a, b) is a is b['a'][0] and a[0] is True"), {}, "correct", ""),
    ("def fail(n):\n    raise KeyError(n)",
     under("try:\n    fail(1)\n    assert False\nexcept KeyError:\n    pass"), {}, "correct", ""),
    ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
     "    def __len__(self): return len(self.items)",
     under("stack = Stack()\nstack.push(3)\nassert stack.items == [3]\nassert len(stack) == 1"), {}, "correct", ""),
    ("def twice(f):\n    return lambda x: f(f(x))", under("assert twice(lambda x: x + 3)(1) == 7"), {}, "correct", ""),
    # A program cannot put its own names in the place of the test's.
    *(("def square(n): return -1\ndef isclose(*a): return True\nabs = isclose\nclass math: isclose = isclose",
       under(f"assert {said}"), {}, "incorrect", "")
      for said in ("isclose(square(2), 4)", "math.isclose(square(2), 4)", "abs(square(2)) == 4")),
    # Broken tests.
    (SQUARE, under("assert ("), {}, "bad_reference", "does not compile"),
    (SQUARE, under("assert 1 == 2"), {}, "bad_reference", "before it called the program"),
    (SQUARE, under("import no_such_module\nassert square(1)"), {}, "bad_reference",
     "before it called the program, the test ended with ModuleNotFoundError"),
    (SQUARE, under("while True: pass\nassert square(1)"), SHORT, "bad_reference", "before it called the program"),
    ("def f(n): return 1", under("import os; os._exit(3); f(1)"), {}, "verifier_crashed", "status 3"),
    *((source, under("def check(candidate):\n    if candidate(1): f(1), g(1)"), {}, "bad_reference",
       "reference.entry_point")
      for source in ("f = g = print", "def f(n): return n", "def g(n): return n", "def h(n): return n")),
]  # fmt: skip

STACK = "class Stack(list):\n    push = list.append\nclass Box:\n    def __init__(self): self.items = []"
HALF = "    return n // 2\ntwice = None"
HELPED = under("def check(candidate):\n    assert candidate(twice(4)) == 4 and add(1, 3) in (3, 4)", "half")
STRICT = [
    ("def f(g): return g(1)", under("assert f(lambda n: n + 1) == 2", "f"), {}, "correct", ""),
    (STACK, under("def check(c):\n    assert c([1]) == [1]", "Stack"), {}, "correct", ""),
    (STACK, under("def check(c):\n    assert c().items == []", "Box"), {}, "incorrect", "'OpaqueObject' object has no"),
    ("def g(): return 4", under("def check(c):\n    assert g() == 4 and c() == 4", "f"), {}, "bad_reference",
     "the test uses g, and"),
    ("def f(n): return n", under("assert f(n) == m", "f"), {}, "bad_reference",
     "the test uses m and n, and of the program only f"),
    ("def f(n): return n", under("class A: pass\nassert f(1) == 1 and f(A())", "f"), {}, "bad_reference",
     "an object of A; strict mode"),
    (STACK, under("assert Stack([1]) == [1] and Box().items == []", "Stack"), {"strict": False}, "correct", ""),
    # The helpers of a strict test are the prefix's.
    (HALF, HELPED, {"prefix": "def twice(n):\n    return 2 * n\n\ndef half(n):\n    'Half of n'\n"}, "correct", ""),
    (HALF, HELPED, {"prefix": "def add(a, b):\n    return a * b\ntwice = lambda n: add(n, 2)\ndef half(n):\n"},
     "correct", ""),
    (HALF, HELPED, {"prefix": "def half(n):\n    'Half of n'\n"}, "bad_reference",
     "the test uses twice, and of the program only half"),
    (HALF, HELPED, {"prefix": "import nothing_like_it\ndef half(n):\n"}, "bad_reference",
     "`prefix`, of which the test may use add and twice, fails: Module"),
]  # fmt: skip


def calls(*cases: tuple[str, str], of: str = "add") -> dict:
    return {"cases": list(cases), "entry_point": of}


LEETCODE = (
    "class Solution:\n    def total(self, nums: List[int], most: Optional[float] = inf) -> int:\n"
    "        return reduce(add, accumulate(takewhile(lambda each: each < min(most, sys.maxsize), nums)), gcd(0, 0))\n"
)
CASES = [
    ("def add(a, b): return a + b", calls(("[1, 2]", "3"), ("[2, 2]", "4")), {}, "correct", ""),
    ("def add(a, b): return a * b", calls(("[2, 2]", "4"), ("[1, 2]", "3")), {}, "incorrect", ""),
    ("class Solution:\n    def add(self, a: int, b: int): return a + b", calls(("[1, 2]", "3")), {}, "correct", ""),
    ("class Solution:\n    def add(self, x: List[int]): return sum(x)", calls(("[[1, 2]]", "3")), {}, "correct", ""),
    ("def add(x): return sum(x)", calls(("[1, 2]", "3"), ("[4, 5, 6]", "15")), {}, "correct", ""),
    ("def add(x): return x", calls(("[1]", "[1]")), {"arguments": "lines"}, "correct", ""),
    ("def add(x): return 0.1 + 0.2", calls(("1", "0.3")), {"tolerance": 1e-9}, "correct", ""),
    ("def add(x): return x + 1e-9", calls(("1", "1")), {"tolerance": 1e-6}, "incorrect", ""),
    ("def add(x): return 'YES '", calls(("1", '"Yes"')), {"compare": "lenient"}, "correct", ""),
    ("def add(x): return '12'", calls(("1", "12")), {"compare": "lenient"}, "incorrect", ""),
    ("def add(x):\n    while x: pass", calls(("0", "null"), ("1", "null")), {"timeout_seconds": 0.5}, "timed_out", ""),
    ("async def add(x): return [x]", calls(("3", "[3]")), {}, "correct", ""),
    ("add = int", calls(('["12"]', "12")), {}, "correct", ""),
    # An answer is data at any depth before it is compared.
    *(
        (f"def add(x): return {answer}", calls(("3", expected)), {}, outcome, says)
        for answer, expected, outcome, says in (
            ("map(str, range(x))", '["0", "1", "2"]', "correct", ""),
            ("[map(int, '12'), zip('ab', '12')]", '[[1, 2], [["a", "1"], ["b", "2"]]]', "correct", ""),
            ("{'a': (each for each in [iter([x])])}", '{"a": [[3]]}', "correct", ""),
            ("[range(x), {1: 2}.keys(), reversed([1, 2])]", "[[0, 1, 2], [1], [2, 1]]", "correct", ""),
            ("[iter([x])] * 2", "[[3], [3]]", "correct", ""),
            ("(each for each in [1, 1 // 0])", "[1]", "runtime_error", "ZeroDivisionError"),
            ("[lambda: 3]", "[3]", "incorrect", "which are no data"),
            ("[{'a': object()}]", "[3]", "incorrect", "which are no data"),
        )
    ),
    # Every program that is called finds the usual names, which are not its own.
    (LEETCODE, under("def check(f):\n    assert f(nums=[1, 2]) == 4", "Solution().total"), {}, "correct", ""),
    (LEETCODE, under("assert Solution().total([1, 2]) == 4"), {}, "correct", ""),
    (LEETCODE, calls(("[[1, 2]]", "4"), of="total"), {}, "correct", ""),
    ("'I define nothing.'", calls(("[12, 18]", "6"), of="gcd"), {}, "runtime_error", ""),
    # References without usable tests.
    (SQUARE, {}, {}, "bad_reference", "neither test_cases nor test_program"),
    (SQUARE, {**ADD_ONE, **under("assert square(1)")}, {}, "bad_reference", "one of them is allowed"),
    (SQUARE, calls(("1", "two"), of="square"), {}, "bad_reference", "test_cases[0].output: 'two' is not JSON"),
]

ANY_DIVISOR = "def check(input, output, expected):\n    return int(input) % int(output) == 0 and int(output) > 1"
LISTS_OF_7 = (
    "def check(i, output, e):\n"
    "    return type(output) is list and len(output) == 2 and all(type(o) is list and o == [7] for o in output)"
)
TWELVE, ONE = {"cases": [("12", "2")]}, {"cases": [("1", "1")]}
CHECKERS = [
    ("print(3)", TWELVE, {"checker": ANY_DIVISOR}, "correct", ""),
    ("print(5)", TWELVE, {"checker": ANY_DIVISOR}, "incorrect", ""),
    ("print('many')", TWELVE, {"checker": ANY_DIVISOR}, "incorrect", ""),
    *((f"def f(n):\n    {body}", calls(("[3]", "[[7], [7]]"), of="f"), {"checker": LISTS_OF_7}, outcome, "")
      for body, outcome in (
          ("return [iter([7]), map(int, '7')]", "correct"),
          ("yield from ([7], (each for each in [7]))", "correct"),
          ("return [iter([8]), iter([7])]", "incorrect"),
          ("return [iter([]), iter([7])]", "incorrect"),
          ("return [lambda: 7, lambda: 7]", "incorrect"),
          ("return [type('Seven', (), {'__len__': lambda s: 1, '__getitem__': lambda s, n: 7})()] * 2", "incorrect"),
      )),
    ("print(1)", ONE, {"checker": "def check("}, "bad_reference", "the checker program fails"),
    ("print(1)", ONE, {"checker": "def check(input, output, expected): return False"}, "bad_reference",
     "does not accept the expected answer"),
    ("print(1)", ONE, {"checker": "def check(input, output, expected): return 1"}, "bad_reference",
     "must return a bool"),
]  # fmt: skip

PRELUDE = """
from decimal import Decimal

def act(how):
    match how:
        case 'raises': raise ValueError(10 ** 5000)
        case 'zero': return 0
        case 'long': return 10 ** 5000

def hostile(base, name, how):
    method = lambda self, *arguments, **named: act(how)
    return type('Hostile', (base,), {name: property(method) if name == '__class__' else method})

"""
SEVEN, LISTS = calls(("[1]", "7"), of="f"), calls(("[1]", '["quartet", 7]'), of="f")
CHECK = under("def check(candidate):\n    assert candidate(1) == 'quartet', candidate(1)", "f")
SORTED = {"checker": "def check(i, o, e): return sorted(o, key=repr) == sorted(e, key=repr)"}
LONG = "def g():\n    nonlocal " + "\U00010330" * 500  # letters of twelve bytes each in the judge's report
DEEP = "def deep(n):\n    made = ()\n    for _ in range(n): made = (made,)\n    return made\n"
# No program makes a good reference fail.
HOSTILE = [
    (PRELUDE + source, tests, parameters, outcome, "")
    for source, tests, parameters, outcome in (
        ("def f(n): return Decimal('sNaN')", SEVEN, {}, "incorrect"),
        ("def f(n): return [Decimal('sNaN'), 1]", LISTS, {"tolerance": 0.1}, "incorrect"),
        ("def f(n): return Decimal('sNaN')", CHECK, {}, "incorrect"),
        ("def f(n): return {}[10 ** 5000]", SEVEN, {}, "runtime_error"),
        ("def f(n): assert 0, 10 ** 5000", CHECK, {}, "runtime_error"),
        ("def f(n): return 10 ** 5000", CHECK, {}, "incorrect"),
        ("def f(n): return [hostile(object, '__repr__', 'raises')()] * 2", LISTS, SORTED, "incorrect"),
        ("def f(n): return hostile(object, '__repr__', 'raises')()", CHECK, {}, "incorrect"),
        ("raise SystemExit(hostile(object, '__class__', 'long')())", SEVEN, {}, "runtime_error"),
        ("f = hostile(object, '__call__', 'zero')()", SEVEN, {}, "incorrect"),
        (LONG, CHECK, {}, "compile_error"),
        ("def f(n): raise type('\\ud800' * 10**6, (Exception,), {})", SEVEN, {}, "runtime_error"),
        ("import os\nos.write(2, b'\\xed\\xa0\\x80' * 10**4)\nos._exit(3)", SEVEN, {}, "runtime_error"),
        ("print('no')", {"cases": [("1", "quartet")]}, {"checker": "def check(i, o, e): return o == e or exit(o)"},
         "incorrect"),
        # What the test does before its first call depends on what the program defines.
        ("f = None", CHECK, {}, "incorrect"),
        ("f = object()", under("assert callable(f) and f(1)"), {}, "incorrect"),
        ("f = g = print", under("assert f is not g and f(1) and g(1)"), {}, "incorrect"),
        ("'nothing'", under("try:\n    f(1)\nexcept NameError:\n    pass\nelse:\n    assert 0"), {}, "runtime_error"),
        # What the test passes on is made of the program's answers.
        ("def f(g): return g(99)", under(DEEP + "assert f(deep) == 1"), {}, "runtime_error"),
        (DEEP + "f = deep", under("assert f(((((f(59),),),),)) == 1"), {}, "incorrect"),
        ("def f(g): return g(g)", under("def again(g): return f(again)\nassert f(again)"), {}, "runtime_error"),
        # A checker that accepts the expected result in one reading of the arguments only.
        ("def f(n): return n", calls(("[1, 2]", "3"), of="f"), {"checker": "def check(i, o, e): return sum(i) == o"},
         "runtime_error"),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "tests", "parameters", "outcome", "says"),
    [*OUTPUTS, *ASSERTIONS, *STRICT, *CASES, *CHECKERS, *HOSTILE],
)
async def test_what_becomes_of_a_program(sandbox, source, tests, parameters, outcome, says):
    found = await judged(sandbox, program(source, **tests), **parameters)
    if found.HasField("failure"):
        assert metrics.failure_name(found.failure.kind) == outcome and says in found.failure.message, found
        return
    score = found.score
    assert metrics.outcome_name(score.outcome) == outcome and says in score.reason, found
    assert score.reward == score.ans_acc == (1.0 if outcome == "correct" else 0.0)
    assert score.format_acc == 1.0 and score.parsed_answer[:100] == source.strip()[:100]


SQUARES = calls(("[1]", "1"), ("[2]", "4"), ("[3]", "9"), of="f")


@pytest.mark.parametrize(
    ("source", "tests", "passed"),
    [
        ("n = int(input())\nprint(n + 1 if n < 2 else n)", ADD_ONE, 1),
        ("import os\ndef f(n): return n * n if n < 3 else os._exit(1)", SQUARES, 2),
        ("def f(n):\n    while n > 1: pass\n    return 1", SQUARES, 1),
        ("def f(n): return n + n", under("def check(candidate):\n    assert candidate(3) == 9", "f"), 0),
    ],
)
async def test_tests_that_passed_are_counted(sandbox, source, tests, passed):
    seconds = 2.0 if "while" in source else 10.0
    found = await judged(sandbox, program(source, **tests), timeout_seconds=seconds)
    (part,) = found.score.verifiers
    assert (part.tests, part.tests_passed) == (len(tests.get("cases", "1")), passed)


async def test_what_needs_no_sandbox_is_said_without_one():
    no_program = reward_pb2.ScoreItem(item_id="a", completion="I give up.", reference=program("", **ADD_ONE).reference)
    score = (await judged(None, no_program)).score
    assert (score.outcome, score.format_acc) == (reward_pb2.OUTCOME_MALFORMED, 0.0)
    for source, outcome in (("print('\0')", "compile_error"), ("#" * (1 << 20), "resource_exceeded")):
        found = await judged(None, program(source, **ADD_ONE))
        assert metrics.outcome_name(found.score.outcome) == outcome


@pytest.mark.parametrize(
    ("completion", "outcome"),
    [
        ("print(int(input()) + 1)", "correct"),
        ("n = int(input())\nprint(n + 1)<|im_end|>", "correct"),
        ("print(int(input()))", "incorrect"),
        ("x = 5 is the answer.", "malformed"),
        ("import the numbers and add one", "malformed"),
        ("```python\nx = 5 is the answer.\n```", "compile_error"),
    ],
)
async def test_a_completion_without_fences_is_a_program_if_it_compiles(sandbox, completion, outcome):
    one = program("", **ADD_ONE)
    one.completion = completion
    score = (await judged(sandbox, one)).score
    assert metrics.outcome_name(score.outcome) == outcome and score.format_acc == (outcome != "malformed"), score


async def test_the_prompt_opens_the_fence_or_the_thought(sandbox):
    one = program("", **ADD_ONE)
    one.prompt, one.completion = "Add one.\n```python\n", "print(int(input()) + 1)\n```\nDone."
    assert (await judged(sandbox, one)).score.outcome == reward_pb2.OUTCOME_CORRECT
    one.prompt, one.completion = "<think>\n", "```python\nprint(int(input()) + 1)\n```"
    assert (await judged(sandbox, one)).score.outcome == reward_pb2.OUTCOME_MALFORMED


class Absent:
    """A sandbox that cannot run anything."""

    async def run(self, job):
        raise SandboxUnavailable("out of order")


@pytest.mark.parametrize("sandbox", [None, Absent()])
async def test_without_a_sandbox_there_is_no_verdict(sandbox):
    failure = (await judged(sandbox, program(SQUARE, **ADD_ONE))).failure
    assert failure.kind == reward_pb2.FAILURE_KIND_SANDBOX_UNAVAILABLE and failure.retryable


async def test_a_checker_decides_alone():
    with pytest.raises(ValidationError, match="a checker decides alone; got tolerance"):
        CodeParameters(checker=ANY_DIVISOR, tolerance=0.1)
    with pytest.raises(ValidationError, match="a checker decides alone; got compare = 'lenient'"):
        CodeParameters(checker=ANY_DIVISOR, compare="lenient")
