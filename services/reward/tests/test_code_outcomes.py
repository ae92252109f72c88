"""Whatever a program returns, raises or prints is an outcome of that program, never a failure of the verifier.

Programs run in the sandbox, and their results are the messages that the service answers with.
"""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from quartet.v1 import reward_pb2
from reward_samples import program as item_of
from reward_samples import result_of, scorer, spec

from quartet_reward.config import SandboxSection
from quartet_reward.sandbox.modes import open_sandbox

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
    *("'\\ud800\U00010400\\0\\n' * 500_000",),
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
def judge(runner: asyncio.Runner) -> Iterator[Callable]:
    """Return what becomes of programs, each with its reference's fields and its parameters."""
    sandbox = runner.run(open_sandbox(SandboxSection()))
    by_code = scorer(sandbox)

    async def one(source: str, reference: dict, parameters: dict) -> reward_pb2.ScoreResult:
        item = item_of("", **reference)
        item.completion = source
        item.verifiers.append(spec("code", **{"program_in": "completion", "timeout_seconds": 10.0, **parameters}))
        return await result_of(item, by_code)

    async def all_of_them(tests: list[tuple[str, dict, dict]]) -> list[reward_pb2.ScoreResult]:
        return await asyncio.gather(*(one(*test) for test in tests))

    yield lambda tests: runner.run(all_of_them(tests))
    runner.run(sandbox.close())


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])  # a failure names one program
@given(st.lists(programs, min_size=8, max_size=8))
def test_what_a_program_returns_or_raises_is_its_outcome(judge, several):
    tests = [(program, *style) for program in several for style in STYLES]
    for (program, *style), result in zip(tests, judge(tests), strict=True):
        assert result.HasField("score"), (program.removeprefix(PRELUDE), style, result)
        assert result.score.outcome != CORRECT, (program.removeprefix(PRELUDE), style, result)
        assert 1 <= len(result.score.reason) <= 1000 and result.score.verifiers[0].HasField("tests_passed"), result


LONG = "def g():\n    nonlocal " + "\U00010330" * 500  # letters of twelve bytes each in the judge's report
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
        ("def f(n): raise type('\\ud800' * 10**6, (Exception,), {})", *STYLES[0], RAISED),
        ("import os\nos.write(2, b'\\xed\\xa0\\x80' * 10**4)\nos._exit(3)", *STYLES[0], RAISED),
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
        ("def f(g): return g(g)", {"test_program": "def again(g): return f(again)\nassert f(again)"}, {}, RAISED),
        # A checker that accepts the expected result in one reading of the arguments only.
        ("def f(n): return n", ADD, {"checker": "def check(i, o, e): return sum(i) == o"}, RAISED),
    ],
)  # fmt: skip
def test_no_program_makes_a_good_reference_fail(judge, program, reference, parameters, outcome):
    (result,) = judge([(PRELUDE + program, reference, parameters)])
    assert result.score.outcome == outcome, result


@pytest.mark.parametrize(
    ("program", "test", "kind", "words"),
    [
        *(
            (program, "def check(candidate):\n    if candidate(1): f(1), g(1)", BAD_REFERENCE, "reference.entry_point")
            for program in ("f = g = print", "def f(n): return n", "def g(n): return n", "def h(n): return n")
        ),
        ("def f(n): return 1", "import os; os._exit(3); f(1)", reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, "status 3"),
    ],
)
def test_a_test_that_does_not_say_what_it_tests_or_ends_before_it_asks_is_a_failure(judge, program, test, kind, words):
    (result,) = judge([(program, {"test_program": test}, {})])
    assert result.failure.kind == kind and words in result.failure.message, result
