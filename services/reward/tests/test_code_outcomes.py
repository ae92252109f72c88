"""Whatever a program returns, raises or prints is an outcome of that program, never a failure of the verifier."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from quartet.v1 import reward_pb2

from quartet_reward.failures import VerifierFailure
from quartet_reward.sandbox.api import Sandbox
from quartet_reward.sandbox.modes import open_sandbox
from quartet_reward.sandbox.settings import SandboxSection
from quartet_reward.verifiers.base import Tools, Verdict
from quartet_reward.verifiers.code import Code, CodeParameters

CORRECT, INCORRECT = reward_pb2.OUTCOME_CORRECT, reward_pb2.OUTCOME_INCORRECT
RAISED, NOT_COMPILED = reward_pb2.OUTCOME_RUNTIME_ERROR, reward_pb2.OUTCOME_COMPILE_ERROR
BAD_REFERENCE = reward_pb2.FAILURE_KIND_BAD_REFERENCE

PRELUDE = """
import array, collections, datetime, decimal, enum, fractions, types, uuid
Decimal, Fraction, Point = decimal.Decimal, fractions.Fraction, collections.namedtuple('Point', 'x y')

def act(how, self):
    match how:
        case 'raises': raise ValueError(10 ** 5000)
        case 'exits': raise SystemExit(0)
        case 'self': return self
        case 'text': return '\\ud800' * 9
        case 'zero': return 0
        case 'nan': return Decimal('sNaN')
        case 'long': return 10 ** 5000

def hostile(base, name, how):
    method = lambda self, *arguments, **named: act(how, self)
    lie = property(method) if name in ('__class__', '__dict__', 'args', 'numerator', 'code', '__name__') else method
    return type('Hostile', (base,), {name: lie})

def ring(kind):
    made = kind()
    made.append(made)
    return made

def noted(error, cause):
    error.add_note('a')
    error.__cause__ = error.__context__ = cause
    error.__notes__.append(cause)
    return error
"""
LEAVES = (
    *("None", "True", "0", "-0.0", "10 ** 5000", "-2 ** 63", "float('nan')", "float('inf')", "1j", "''", "'\\ud800'"),
    *("'\\0'", "'\U0001f600' * 5000", "b'\\xff'", "bytearray(b'a')", "memoryview(b'a')", "range(3)", "slice(1)"),
    *("Decimal('sNaN')", "Decimal('-NaN123')", "Decimal('1e999999')", "Fraction(10 ** 5000, 3)", "..."),
    *("object()", "int", "Point", "print", "f", "lambda: 1", "iter([1])", "(each for each in 'ab')", "types", "super"),
    *("ring(list)", "ring(collections.deque)", "Point(1, 2)", "array.array('i', [1])", "datetime.date.min"),
    *("enum.Enum('Color', 'RED').RED", "enum.IntEnum('Color', 'RED').RED", "types.SimpleNamespace(a=1)", "{}.keys()"),
    *("collections.defaultdict(f)", "collections.Counter('ab')", "collections.ChainMap({})", "zip()", "classmethod(f)"),
    *("uuid.UUID(int=1)", "collections.OrderedDict(a=1)", "NotImplemented"),
)  # fmt: skip
BASES = (
    *("object", "int", "float", "complex", "str", "bytes", "bytearray", "tuple", "list", "dict", "set", "frozenset"),
    *("Decimal", "Fraction", "collections.deque", "collections.Counter", "collections.OrderedDict", "type", "Point"),
)
ERRORS = (
    *("Exception", "ValueError", "KeyError", "StopIteration", "AssertionError", "OSError", "MemoryError", "TypeError"),
    *("UnicodeDecodeError", "SyntaxError", "RecursionError", "BaseException", "SystemExit", "KeyboardInterrupt"),
    *("GeneratorExit", "ImportError", "NameError", "AttributeError", "EOFError", "Warning", "decimal.InvalidOperation"),
)
SPECIAL = (
    *("__eq__", "__ne__", "__lt__", "__hash__", "__repr__", "__str__", "__reduce__", "__class__", "__getattribute__"),
    *("__len__", "__iter__", "__next__", "__bool__", "__index__", "__int__", "__float__", "__call__", "__contains__"),
    *("__getitem__", "__del__", "__dict__", "__format__", "__getattr__", "items", "keys", "numerator", "__init__"),
)
HOW = ("raises", "exits", "self", "text", "zero", "nan", "long")


def chosen(*values: str) -> st.SearchStrategy[str]:
    return st.sampled_from(values)


leaves = chosen(*LEAVES) | st.builds("hostile({}, {!r}, {!r})()".format, chosen(*BASES), chosen(*SPECIAL), chosen(*HOW))
values = st.recursive(
    leaves,
    lambda inner: st.builds(
        lambda form, items: form.format(", ".join(items)),
        chosen("[{}]", "({},)", "[[{}], 1]", "dict(enumerate([{}]))", "{{each: 0 for each in [{}]}}", "frozenset([{}])",
               "collections.deque([{}])", "iter([{}])", "Point([{}], 0)"),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)  # fmt: skip
errors = st.builds(
    "noted({}({}), {})".format,
    chosen(*ERRORS)
    | st.builds(
        "hostile({}, {!r}, {!r})".format, chosen(*ERRORS), chosen(*SPECIAL, "args", "code", "__name__"), chosen(*HOW)
    ),
    st.lists(values, max_size=2).map(", ".join),
    chosen("None", "ValueError('\\ud800')"),
)
groups = st.builds("{}('group', [{}])".format, chosen("BaseExceptionGroup", "ExceptionGroup"), errors)
programs = st.builds(
    lambda form, text: PRELUDE + form.format(text),
    chosen("def f(n):\n    return {}", "f = {}", "f = lambda n: print({})", "def f(n):\n    yield {}"),
    values,
) | st.builds(
    lambda form, text: PRELUDE + form.format(text),
    chosen("def f(n):\n    raise {}", "raise {}", "def f(n):\n    yield 1\n    raise {}"),
    errors | groups,
)

CASES = {"cases": [("[1]", "7")], "entry_point": "f"}
LISTS = {"cases": [("[1]", '["quartet", 7]')], "entry_point": "f"}
ADD = {"cases": [("[1, 2]", "3")], "entry_point": "f"}
CHECK = {
    "test_program": "def check(candidate):\n    assert candidate(1) == 'quartet', candidate(1)",
    "entry_point": "f",
}
TRY = """
try:
    assert abs(f(1)) == 7
except ValueError:
    assert str(f(2)) == "quartet"
"""
UNITTEST = """
import unittest
class Test(unittest.TestCase):
    def test_it(self):
        self.assertEqual(sorted(f(1)), ["quartet"])
"""
CHECKER = """
def check(input, output, expected):
    return f"{output}" == f"{expected}" or sorted(output, key=str) == sorted(expected, key=str)
"""
STYLES = (
    (CASES, {}),
    (CASES, {"tolerance": 0.1}),
    (LISTS, {"any_order": True}),
    (LISTS, {"any_order": True, "tolerance": 0.1}),
    (LISTS, {"checker": CHECKER}),
    (CHECK, {}),
    (CHECK, {"strict": False}),
    ({"test_program": UNITTEST}, {}),
    ({"test_program": TRY}, {}),
    ({"cases": [("1", "quartet")]}, {"any_order": True, "tolerance": 0.1}),
    ({"cases": [("1", "quartet")]}, {"checker": CHECKER}),
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox(runner: asyncio.Runner) -> Iterator[Sandbox]:
    sandbox = runner.run(open_sandbox(SandboxSection()))
    yield sandbox
    runner.run(sandbox.close())


def judge(
    runner: asyncio.Runner, sandbox: Sandbox, tests: list[tuple[str, dict, dict]]
) -> list[Verdict | VerifierFailure]:
    """Return what becomes of each program, by its reference's fields and parameters."""

    async def one(program: str, reference: dict, parameters: dict) -> Verdict:
        cases = [reward_pb2.TestCase(input=given, output=expected) for given, expected in reference.get("cases", ())]
        fields = {name: value for name, value in reference.items() if name != "cases"}
        item = reward_pb2.ScoreItem(completion=program, reference=reward_pb2.Reference(test_cases=cases, **fields))
        chosen = CodeParameters(program_in="completion", **{"timeout_seconds": 2.0, **parameters})
        verdict = Code().verify(item, chosen, Tools(math=None, sandbox=sandbox))
        return verdict if isinstance(verdict, Verdict) else await verdict()

    async def all_of_them():
        return await asyncio.gather(*(one(*test) for test in tests), return_exceptions=True)

    return runner.run(all_of_them())


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])  # a failure names one program
@given(st.lists(programs, min_size=8, max_size=8))
def test_what_a_program_returns_or_raises_is_its_outcome(runner, sandbox, several):
    tests = [(program, *style) for program in several for style in STYLES]
    for (program, *style), verdict in zip(tests, judge(runner, sandbox, tests), strict=True):
        assert isinstance(verdict, Verdict), (program.removeprefix(PRELUDE), style, verdict)
        assert verdict.outcome != CORRECT, (program.removeprefix(PRELUDE), style, verdict)


LONG = "def g():\n    nonlocal " + "\U00010330" * 500
DEEP = "def deep(n):\n    made = ()\n    for _ in range(n): made = (made,)\n    return made\n"


@pytest.mark.parametrize(
    ("program", "reference", "parameters", "outcome"),
    [
        ("def f(n): return Decimal('sNaN')", *STYLES[0], INCORRECT),
        ("def f(n): return Decimal('sNaN')", *STYLES[1], INCORRECT),
        ("def f(n): return [Decimal('sNaN'), 1]", *STYLES[3], INCORRECT),
        ("def f(n): return Decimal('sNaN')", *STYLES[5], INCORRECT),
        ("def f(n): return {}[10 ** 5000]", *STYLES[0], RAISED),
        ("def f(n): return {}[10 ** 5000]", *STYLES[5], RAISED),
        ("def f(n): assert 0, 10 ** 5000", *STYLES[0], RAISED),
        ("def f(n): assert 0, 10 ** 5000", *STYLES[5], RAISED),
        ("assert 0, 10 ** 5000", *STYLES[5], RAISED),
        ("def f(n): return 10 ** 5000", *STYLES[5], INCORRECT),
        ("def f(n): return [hostile(object, '__repr__', 'raises')()] * 2", *STYLES[2], INCORRECT),
        ("def f(n): return hostile(object, '__repr__', 'raises')()", *STYLES[5], INCORRECT),
        ("raise SystemExit(hostile(object, '__class__', 'long')())", *STYLES[0], RAISED),
        ("f = hostile(object, '__call__', 'zero')()", *STYLES[0], INCORRECT),
        (LONG, *STYLES[0], NOT_COMPILED),
        (LONG, *STYLES[5], NOT_COMPILED),
        ("print('no')", STYLES[9][0], {"checker": "def check(i, o, e): return o == e or exit(o)"}, INCORRECT),
        # What the test does before its first call depends on what the program defines.
        ("f = None", *STYLES[5], INCORRECT),
        ("f = object()", *STYLES[5], INCORRECT),
        ("f = object()", {"test_program": "assert callable(f) and f(1)"}, {}, INCORRECT),
        ("f = g = print", {"test_program": "assert f is not g and f(1) and g(1)"}, {}, INCORRECT),
        ("'nothing'", {"test_program": "assert sum(1, 2) == 3"}, {}, RAISED),
        ("'nothing'", {"test_program": "try:\n    f(1)\nexcept NameError:\n    pass"}, {}, RAISED),
        ("'nothing'", {"test_program": "assert globals()['f'] and f(1)"}, {}, RAISED),
        # What the test passes on is made of the program's answers.
        ("def f(g): return g(99)", {"test_program": DEEP + "assert f(deep) == 1"}, {}, RAISED),
        (DEEP + "f = deep", {"test_program": "assert f(((((f(59),),),),)) == 1"}, {}, INCORRECT),
        # A checker that accepts the expected result in one reading of the arguments only.
        ("def f(n): return n", ADD, {"checker": "def check(i, o, e): return sum(i) == o"}, RAISED),
    ],
)  # fmt: skip
def test_no_program_makes_a_good_reference_fail(runner, sandbox, program, reference, parameters, outcome):
    (verdict,) = judge(runner, sandbox, [(PRELUDE + program, reference, parameters)])
    assert isinstance(verdict, Verdict), verdict
    assert verdict.outcome == outcome, verdict


@pytest.mark.parametrize("program", ["f = g = print", "def f(n): return n", "def g(n): return n", "def h(n): return n"])
def test_a_test_that_does_not_say_what_it_tests_is_bad_whatever_the_program_defines(runner, sandbox, program):
    test = "def check(candidate):\n    if candidate(1): f(1), g(1)"
    (failure,) = judge(runner, sandbox, [(program, {"test_program": test}, {})])
    assert (failure.kind, "reference.entry_point" in str(failure)) == (BAD_REFERENCE, True), failure


def test_a_judge_that_ends_before_it_asks_the_program_anything_is_a_failure(runner, sandbox):
    (failure,) = judge(runner, sandbox, [("def f(n): return 1", {"test_program": "import os; os._exit(3); f(1)"}, {})])
    assert failure.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED and "status 3" in str(failure), failure
