"""Whatever a program returns, raises or prints is an outcome of that program, never a failure of the verifier.

Programs run in the sandbox, and their results are the messages that the service answers with.
"""

import pytest
from quartet.v1 import reward_pb2
from reward_samples import program as item_of
from reward_samples import result_of, scorer, spec

from quartet_reward.sandbox.pool import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

INCORRECT = reward_pb2.OUTCOME_INCORRECT
RAISED, NOT_COMPILED = reward_pb2.OUTCOME_RUNTIME_ERROR, reward_pb2.OUTCOME_COMPILE_ERROR
BAD_REFERENCE = reward_pb2.FAILURE_KIND_BAD_REFERENCE

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
CASES = {"cases": [("[1]", "7")], "entry_point": "f"}
LISTS = {"cases": [("[1]", '["quartet", 7]')], "entry_point": "f"}
ADD = {"cases": [("[1, 2]", "3")], "entry_point": "f"}
CHECK = {
    "test_program": "def check(candidate):\n    assert candidate(1) == 'quartet', candidate(1)",
    "entry_point": "f",
}
SORTED = "def check(i, o, e): return sorted(o, key=repr) == sorted(e, key=repr)"
CHECKER = "def check(i, o, e): return o == e or exit(o)"


async def judge(sandbox: Sandbox, source: str, reference: dict, parameters: dict) -> reward_pb2.ScoreResult:
    """What becomes of a program, with its reference's fields and its parameters."""
    item = item_of("", **reference)
    item.completion = source
    item.verifiers.append(spec("code", **{"program_in": "completion", "timeout_seconds": 10.0, **parameters}))
    return await result_of(item, scorer(sandbox))


LONG = "def g():\n    nonlocal " + "\U00010330" * 500  # letters of twelve bytes each in the judge's report
DEEP = "def deep(n):\n    made = ()\n    for _ in range(n): made = (made,)\n    return made\n"


@pytest.mark.parametrize(
    ("program", "reference", "parameters", "outcome"),
    [
        ("def f(n): return Decimal('sNaN')", CASES, {}, INCORRECT),
        ("def f(n): return [Decimal('sNaN'), 1]", LISTS, {"tolerance": 0.1}, INCORRECT),
        ("def f(n): return Decimal('sNaN')", CHECK, {}, INCORRECT),
        ("def f(n): return {}[10 ** 5000]", CASES, {}, RAISED),
        ("def f(n): assert 0, 10 ** 5000", CHECK, {}, RAISED),
        ("def f(n): return 10 ** 5000", CHECK, {}, INCORRECT),
        ("def f(n): return [hostile(object, '__repr__', 'raises')()] * 2", LISTS, {"checker": SORTED}, INCORRECT),
        ("def f(n): return hostile(object, '__repr__', 'raises')()", CHECK, {}, INCORRECT),
        ("raise SystemExit(hostile(object, '__class__', 'long')())", CASES, {}, RAISED),
        ("f = hostile(object, '__call__', 'zero')()", CASES, {}, INCORRECT),
        (LONG, CHECK, {}, NOT_COMPILED),
        ("def f(n): raise type('\\ud800' * 10**6, (Exception,), {})", CASES, {}, RAISED),
        ("import os\nos.write(2, b'\\xed\\xa0\\x80' * 10**4)\nos._exit(3)", CASES, {}, RAISED),
        ("print('no')", {"cases": [("1", "quartet")]}, {"checker": CHECKER}, INCORRECT),
        # What the test does before its first call depends on what the program defines.
        ("f = None", CHECK, {}, INCORRECT),
        ("f = object()", {"test_program": "assert callable(f) and f(1)"}, {}, INCORRECT),
        ("f = g = print", {"test_program": "assert f is not g and f(1) and g(1)"}, {}, INCORRECT),
        ("'nothing'", {"test_program": "try:\n    f(1)\nexcept NameError:\n    pass"}, {}, RAISED),
        # What the test passes on is made of the program's answers.
        ("def f(g): return g(99)", {"test_program": DEEP + "assert f(deep) == 1"}, {}, RAISED),
        (DEEP + "f = deep", {"test_program": "assert f(((((f(59),),),),)) == 1"}, {}, INCORRECT),
        ("def f(g): return g(g)", {"test_program": "def again(g): return f(again)\nassert f(again)"}, {}, RAISED),
        # A checker that accepts the expected result in one reading of the arguments only.
        ("def f(n): return n", ADD, {"checker": "def check(i, o, e): return sum(i) == o"}, RAISED),
    ],
)  # fmt: skip
async def test_no_program_makes_a_good_reference_fail(sandbox, program, reference, parameters, outcome):
    result = await judge(sandbox, PRELUDE + program, reference, parameters)
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
async def test_a_test_that_does_not_say_what_it_tests_or_ends_first_is_a_failure(sandbox, program, test, kind, words):
    result = await judge(sandbox, program, {"test_program": test}, {})
    assert result.failure.kind == kind and words in result.failure.message, result
