"""Judges that stay: which tests they take, that they judge as others do, and when they are not used again."""

import asyncio
import random
import signal
from dataclasses import replace

import pytest
import pytest_asyncio
from quartet.v1 import reward_pb2
from reward_samples import until
from sandbox_modes import MODES, settings

from quartet_reward.code import judged
from quartet_reward.code.data_tests import only_data
from quartet_reward.code.judged import Outcome
from quartet_reward.code.tests import FunctionCases, TestProgram
from quartet_reward.config import Mode, SandboxSection
from quartet_reward.errors import VerifierFailure
from quartet_reward.sandbox import watch
from quartet_reward.sandbox.api import Execution, Job
from quartet_reward.sandbox.modes import open_sandbox
from quartet_reward.sandbox.pool import IsolatedSandbox
from quartet_reward.verifiers.code import CodeParameters

CORRECT, INCORRECT = reward_pb2.OUTCOME_CORRECT, reward_pb2.OUTCOME_INCORRECT
RAISED, TIMED_OUT = reward_pb2.OUTCOME_RUNTIME_ERROR, reward_pb2.OUTCOME_TIMED_OUT
SQUARE = "def f(n):\n    return n * n"
TEST = "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(-1) == 1"

in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox():
    sandbox = await open_sandbox(SandboxSection(slots=2))
    yield sandbox
    await sandbox.close()


@pytest_asyncio.fixture(loop_scope="module")
async def first(sandbox):
    """A judge that stays."""
    await judge(sandbox, SQUARE, TestProgram(TEST, "f"))
    (first,) = sandbox.judges
    return first


class Forked:
    """The sandbox, with a new judge for each judgment."""

    def __init__(self, sandbox: IsolatedSandbox):
        self._sandbox = sandbox
        self.mode = sandbox.mode

    async def run_judged(self, judge: Job, candidate: Job) -> tuple[Execution, Execution]:
        return await self._sandbox.run_judged(replace(judge, shared=False), candidate)


async def judge(sandbox, program: str, tests: TestProgram | FunctionCases, **parameters) -> Outcome:
    return await judged.judge(sandbox, program, tests, CodeParameters(**parameters).rules())


@pytest.mark.parametrize(
    "test",
    [
        TEST,
        'METADATA = {"author": "x"}\n\n\ndef check(candidate):\n    """Words."""\n    assert True, "a message"\n'
        "    assert abs(candidate(2.0) - 4) < 1e-6\n    assert not candidate(None)\n    assert candidate() is None",
        "assert f((1, 2)) == [3, {4}]\nassert set(g(1)) == {2}",
        "def test_it():\n    for n in range(9):\n        assert f(n) == n * n, f'{n}'",
        "assert isinstance(f(3), int) and list(f(3)) == [[n for n in range(3)]]",
        "x = [1]\nf(x)\nassert x[0] == 1",
    ],
)
def test_tests_that_compare_with_data(test):
    assert only_data(test, "f", strict=False)


@pytest.mark.parametrize(
    "test",
    [
        "import math\nassert f(1) == 1", "from os import system\nassert f(1) == 1", "assert f(1).items == 1",
        "assert math.isclose(f(1), 1)", "assert eval(f(1)) == 1", "assert f(eval) == 1",
        "assert f(__builtins__) == 1", "assert __import__('os') and f(1)", "assert f(type) == 1",
        "assert open('/etc/passwd') and f(1)", "assert getattr(f, 'x') == 1", "assert f(lambda: 1) == 1",
        "assert (lambda: f(1))() == 1", "assert f(1)(2) == 3",
        "def check(candidate, eval=1):\n    assert candidate(1)",
        "@f\ndef check(candidate):\n    assert candidate(1)", "def check(candidate: print):\n    assert candidate(1)",
        "def check(candidate):\n    def inner(): pass\n    assert candidate(1)",
        "def len(x):\n    return 1\nassert len(f(1)) == 1", "sum = 3\nassert f(1) == 1",
        "class A: pass\nassert f(1) == 1", "while f(1): pass", "try:\n    f(1)\nexcept ValueError:\n    pass",
        "with f(1): pass", "def check(candidate):\n    global f\n    assert candidate(1)", "del f",
        "assert (x := f(1)) == 1", "async def check(candidate):\n    assert candidate(1)",
        "assert reduce(f, [1]) == 1", "assert f(partial) == 1", "assert f(",
        "assert f(1) == " + "(" * 500 + ")" * 500, "assert f(1) == " + "-" * 100_000 + "1",
    ],
)  # fmt: skip
def test_tests_that_do_more(test):
    assert not only_data(test, "f", strict=False)


ALWAYS = "type('T', ({},), {{'__eq__': lambda *a: True}})"
# What programs may answer: alike and not the same, no plain data, raising, ending.
ANSWERS = (
    *("0", "1", "True", "False", "None", "1.0", "-0.0", "float('nan')", "float('inf')", "10 ** 30", "'1'", "''"),
    *("b'1'", "(1, 2)", "[1, 2]", "{1, 2}", "{1: 2}", "{'1': 2}", "[True, 2.0]", "range(1, 3)", "iter([1, 2])"),
    *("[[1], (2,)]", "1j", "object()", f"{ALWAYS.format('int')}(5)", f"{ALWAYS.format('object')}()", "f", "1 / 0"),
    *("[][1]", "f(n)", "__import__('os')._exit(0)", "exit(0)", "n", "...", "{(1, 2): [3]}", "[float('nan')]"),
)
DATA = (
    *("0", "1", "True", "None", "1.0", "-0.0", "float('nan')", "'1'", "[1, 2]", "(1, 2)", "{1, 2}", "{1: 2}", "[]"),
)
RESULTS = ("0", "1", "true", "null", "1.0", "-0.0", "NaN", '"1"', "[1, 2]", '{"1": 2}', "[[1], [2]]")
FORMS = (
    "assert candidate({a}) == {b}",
    "assert candidate({a}) != {b}, 'no'",
    "assert candidate({a}) is {b}",
    "assert {b} == candidate({a})",
    "assert not candidate({a})",
    "assert candidate({a})",
    "assert candidate({a}) in [{b}, 1]",
    "assert list(candidate({a})) == {b}",
    "assert tuple(candidate({a})) == {b}",
    "assert abs(candidate({a}) - 1) < 1e-6",
    "assert sorted(candidate({a})) == sorted({b})",
    "assert len(candidate({a})) == 2",
    "assert {b} == {b}",
    "assert isinstance(candidate({a}), int)",
    "x = candidate({a})\n    assert x == {b} and x == x",
)


def check_of_a_program(rng: random.Random) -> TestProgram:
    lines = [rng.choice(FORMS).format(a=rng.choice(DATA), b=rng.choice(DATA)) for _ in range(rng.randint(1, 2))]
    tests = TestProgram("def check(candidate):\n    " + "\n    ".join(lines), "f")
    assert only_data(tests.source, "f", strict=True)
    return tests


def cases_of_a_function(rng: random.Random) -> FunctionCases:
    return FunctionCases("f", [(f"[{rng.choice(RESULTS)}]", rng.choice(RESULTS)) for _ in range(2)])


@pytest.mark.parametrize(("tests_of", "count", "kinds"), [(check_of_a_program, 80, 4), (cases_of_a_function, 40, 2)])
@in_one_loop
async def test_they_find_what_a_new_judge_finds(sandbox, tests_of, count, kinds):
    rng = random.Random(7)
    seen = set()
    for _ in range(count):
        program, tests = f"def f(n=None):\n    return {rng.choice(ANSWERS)}", tests_of(rng)
        found = [await _said(each, program, tests) for each in (sandbox, Forked(sandbox))]
        assert found[0] == found[1], (program, tests)
        seen.add(found[0][0])
    assert len(seen) >= kinds  # or the programs are all of one kind


async def _said(sandbox, program, tests, seconds=5.0) -> tuple:
    try:
        outcome = await judge(sandbox, program, tests, timeout_seconds=seconds)
    except VerifierFailure as failure:
        return failure.kind, str(failure)
    return outcome.outcome, outcome.reason.split(" at 0x")[0], outcome.passed


@in_one_loop
async def test_one_judges_again_and_again(sandbox, first):
    for program, outcome in (
        (SQUARE, CORRECT),
        ("def f(n):\n    return n", INCORRECT),
        ("def f(n):\n    1 / 0", RAISED),
    ):
        for tests in (TestProgram(TEST, "f"), FunctionCases("f", [("[3]", "9")])):
            assert (await judge(sandbox, program, tests)).outcome == outcome
    assert sandbox.judges == [first]


FORGED = '{"answer": 2, "nodes": [], "changed": [], "value": ["mine", 3]}'


@pytest.mark.parametrize(
    ("program", "outcome", "seconds"),
    [
        ("def f(n):\n    while True: pass", TIMED_OUT, 1.0),
        ("def f(n):\n    import os\n    os._exit(0)", RAISED, 10.0),
        ("import os\ndef f(n):\n    os.write(3, b'\\0\\0\\0\\1x')", INCORRECT, 10.0),
        (f"import os\ndef f(n):\n    os.write(3, b'\\0\\0\\0\\{len(FORGED):o}{FORGED}')", INCORRECT, 10.0),
        ("def f(n):\n    return [[] for _ in range(150_000)]", INCORRECT, 30.0),
    ],
)
@in_one_loop
async def test_one_that_met_something_else_is_not_used_again(sandbox, first, program, outcome, seconds):
    found = await judge(sandbox, program, TestProgram(TEST, "f"), timeout_seconds=seconds)
    assert found.outcome == outcome, found
    assert first not in sandbox.judges
    assert (await judge(sandbox, SQUARE, TestProgram(TEST, "f"))).outcome == CORRECT


@in_one_loop
async def test_a_busy_one_is_killed_at_the_limit(sandbox):
    tests = TestProgram("def check(candidate):\n    for n in range(10 ** 12):\n        n == n\n    candidate(1)", "f")
    failure = await _said(sandbox, SQUARE, tests, 0.3)
    assert failure[0] == reward_pb2.FAILURE_KIND_BAD_REFERENCE, failure
    tests = TestProgram("def check(candidate):\n    candidate(1)\n    for n in range(10 ** 12):\n        n == n", "f")
    assert (await judge(sandbox, SQUARE, tests, timeout_seconds=2.0)).outcome == TIMED_OUT
    assert (await judge(sandbox, SQUARE, TestProgram(TEST, "f"))).outcome == CORRECT


@in_one_loop
async def test_one_that_has_died_is_replaced(sandbox, first):
    signal.pidfd_send_signal(first.run._main_handle, signal.SIGKILL)
    async with asyncio.timeout(30):
        await first.run.ended.wait()
    assert (await judge(sandbox, SQUARE, TestProgram(TEST, "f"))).outcome == CORRECT
    assert sandbox.judges != [first]


@in_one_loop
async def test_cancelling_ends_it_and_frees_the_slots(sandbox, first):
    before = first._judgments
    endless = asyncio.create_task(judge(sandbox, "def f(n):\n    while True: pass", TestProgram(TEST, "f")))
    await until(lambda: first._judgments > before)
    endless.cancel()
    async with asyncio.timeout(30):
        await first.run.ended.wait()
        assert (await judge(sandbox, SQUARE, TestProgram(TEST, "f"))).outcome == CORRECT


@in_one_loop
async def test_its_slot_can_be_used_for_something_else(sandbox, first):
    executions = await asyncio.gather(*(sandbox.run(Job("script", b"print(1)")) for _ in range(4)))
    assert [each.stdout for each in executions] == [b"1\n"] * 4
    assert sandbox.judges == []
    assert first.run.ended.is_set()


@pytest.mark.parametrize(
    ("tests", "parameters"),
    [
        (TestProgram("import math\nassert math.isclose(f(2), 4)", ""), {}),
        (TestProgram(TEST, "f"), {"memory_bytes": 64 << 20}),
    ],
    ids=["a test that does more", "little memory"],
)
@in_one_loop
async def test_none_stays(tests, parameters):
    sandbox = await open_sandbox(SandboxSection(slots=2))
    assert (await judge(sandbox, SQUARE, tests, **parameters)).outcome == CORRECT
    assert sandbox.judges == []
    await sandbox.close()


@pytest.mark.parametrize("mode", MODES)
@in_one_loop
async def test_in_every_mode(mode):
    sandbox = IsolatedSandbox(settings(mode, slots=2), mode)
    await sandbox.start()
    try:
        for program, outcome in ((SQUARE, CORRECT), ("def f(n):\n    return n", INCORRECT), (SQUARE, CORRECT)):
            assert (await judge(sandbox, program, TestProgram(TEST, "f"))).outcome == outcome
        (first,) = sandbox.judges
        kills = "import os, signal\ntry:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError:\n    pass\n"
        assert (await judge(sandbox, kills + "def f(n):\n    return 0", TestProgram(TEST, "f"))).outcome != CORRECT
        if mode is not Mode.UNSAFE:  # there, as an ordinary user, programs are not kept from each other
            assert sandbox.judges == [first]
    finally:
        await sandbox.close()


@in_one_loop
async def test_closing_the_sandbox_ends_it():
    sandbox = await open_sandbox(SandboxSection(slots=2))
    await judge(sandbox, SQUARE, TestProgram(TEST, "f"))
    (first,) = sandbox.judges
    pid = watch.pid_of(first.run._main_handle)
    assert pid
    await sandbox.close()
    assert sandbox.judges == []
    assert first.run.ended.is_set()
