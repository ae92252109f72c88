"""No part of a test program is silently left out: it runs, or the reference is bad and the reason names it."""

import pytest
from quartet.v1 import reward_pb2
from reward_samples import judged, program

from quartet_reward import metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT, WRONG = "def f(n): return n * n", "def f(n): return n * n if n == 1 else 0"
ONCE = "assert f(1) == 1\n"  # what is run in any case

RUN = [
    "if __name__ == '__main__':\n    assert f(2) == 4",
    "def main():\n    assert f(2) == 4\n\nif __name__ == '__main__':\n    main()",
    "def tests():\n    assert f(2) == 4",
    "def testTwo(): assert f(2) == 4",
    "def verify():\n    assert f(2) == 4",
    "def test_two(n=2):\n    assert f(n) == 4",
    "def test_two():\n    assert f(2) == 4\nprint(test_two)",
    "def test_two():\n    assert f(2) == 4\nall_tests = [test_two]",
    "def test_two():\n    assert f(2) == 4\nif False:\n    test_two()",
    "def test_two():\n    assert f(2) == 4\ndef test_two():\n    assert f(1) == 1\ntest_two()",
    "def test_all():\n    def test_two():\n        assert f(2) == 4",
    "def test_all():\n    def two():\n        assert f(2) == 4",
    "import sys\ndef test_two():\n    assert f(2) == 4\nsys.exit(0)",
    "def test_two():\n    if f(2) != 4:\n        raise ValueError('two')",
    "def test_two():\n    try:\n        assert f(2) == 4\n    finally:\n        pass",
    "class TestF:\n    def test_two(self):\n        assert f(2) == 4",
    "class TestF:\n    def setup_method(self): self.n = 2\n    def test_two(self): assert f(self.n) == 4",
    "class TestF:\n    @classmethod\n    def setup_class(cls):\n        cls.n = 2\n"
    "    def test_two(self):\n        assert f(self.n) == 4",
    "class TestF:\n    class TestTwo:\n        @staticmethod\n        def test_two():\n            assert f(2) == 4",
    "class Common:\n    def test_two(self):\n        assert f(self.n) == 4\nclass TestF(Common):\n    n = 2",
    "class FTests:\n    def test_two(self):\n        assert f(2) == 4",
    "N = 1\ndef setup_module(module):\n    module.N = 2\ndef test_two():\n    assert f(N) == 4",
    "async def test_two():\n    assert f(2) == 4",
    "class TestF:\n    async def test_two(self):\n        assert f(2) == 4",
    "import asyncio\nasync def two():\n    assert f(2) == 4\nasyncio.run(two())",
    "import unittest\nclass TestF(unittest.TestCase):\n    def test_two(self):\n        self.assertEqual(f(2), 4)\n"
    "unittest.main()",
    "import unittest\nclass TestF(unittest.TestCase):\n    def test_two(self):\n        self.assertEqual(f(2), 4)\n"
    "unittest.main(argv=['first-arg-is-ignored'], exit=False, verbosity=2)\nassert f(1) == 1",
    "from unittest import TestCase, main\nclass TestF(TestCase):\n    def test_two(self):\n"
    "        self.assertEqual(f(2), 4)\nif __name__ == '__main__':\n    main()",
    "import unittest\nclass TestF(unittest.IsolatedAsyncioTestCase):\n    async def test_two(self):\n"
    "        self.assertEqual(f(2), 4)",
    "import unittest\ndef test_all():\n    class TestF(unittest.TestCase):\n        def test_two(self):\n"
    "            self.assertEqual(f(2), 4)",
    "import unittest\nclass TestF(unittest.TestCase):\n    def test_two(self):\n        self.assertEqual(f(2), 4)\n"
    "suite = unittest.defaultTestLoader.loadTestsFromTestCase(TestF)\nunittest.TextTestRunner().run(suite)",
    "from unittest.mock import patch\n@patch('builtins.print')\ndef test_two(printed):\n    assert f(2) == 4",
]


@pytest.mark.parametrize("test", RUN)
async def test_collected_tests_judge_programs(sandbox, test):
    for source, outcome in ((RIGHT, "correct"), (WRONG, None)):
        found = await judged(sandbox, program(source, test_program=ONCE + test))
        assert found.HasField("score"), found
        assert outcome in (None, metrics.outcome_name(found.score.outcome)), found
    assert found.score.outcome in (reward_pb2.OUTCOME_INCORRECT, reward_pb2.OUTCOME_RUNTIME_ERROR), found


NAMED = [
    ("def test_two(two):\n    assert f(two) == 4", "test_two takes arguments (two)"),
    ("def test_two(*, n):\n    assert f(n) == 4", "test_two takes arguments (n)"),
    ("def test_two(n):\n    assert f(n) == 4\ncases = [test_two]", "test_two takes arguments (n)"),
    ("def test_two(n):\n    assert f(n) == 4\nmap(test_two, [2])", "test_two takes arguments (n)"),
    ("class TestF:\n    def test_two(self, n):\n        assert f(n) == 4", "TestF.test_two takes arguments (n)"),
    ("class TestF:\n    def __init__(self, n): pass\n    def test_two(self):\n        assert f(2) == 4",
     "TestF takes arguments (n)"),
    ("def test_two():\n    assert f(2) == 4\n    yield", "test_two does not run"),
    ("import unittest\nclass TestF(unittest.TestCase):\n    async def test_two(self):\n        assert f(2) == 4",
     "TestF.test_two does not run"),
    ("def test_two(n):\n    assert f(n) == 4\ndef test_two():\n    assert f(1) == 1\n", ""),
    ("@(lambda g: lambda: None)\ndef test_two():\n    assert f(2) == 4", "test_two does not run"),
    ("import pytest\n@pytest.mark.parametrize('n', [2])\ndef test_two(n):\n    assert f(n) == 4", "pytest"),
]  # fmt: skip


@pytest.mark.parametrize(("test", "says"), NAMED)
async def test_the_reference_is_bad_by_name(sandbox, test, says):
    for source in (RIGHT, WRONG):
        failure = (
            await judged(sandbox, program(source, test_program=test if "pytest" in test else ONCE + test))
        ).failure
        assert failure.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE and says in failure.message, failure


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("f(2)", "asserts nothing"),
        ("print(f(2) == 4)", "asserts nothing"),
        ("if f(2) == 4:\n    print('passed')", "asserts nothing"),
        ("def test_two():\n    return f(2) == 4", "asserts nothing"),
        ("def verify(n):\n    assert f(n) == 4\nf(2)", "no assertion of the test program is ever reached"),
        ("f(2)\nif False:\n    assert f(2) == 4", "no assertion of the test program is ever reached"),
        ("f(2)\nif __name__ == '__test__':\n    assert f(2) == 4", "no assertion of the test program is ever reached"),
    ],
)
async def test_a_test_that_asserts_nothing_is_a_bad_reference(sandbox, test, says):
    for source in (RIGHT, WRONG):
        failure = (await judged(sandbox, program(source, test_program=test))).failure
        assert failure.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE and says in failure.message, failure


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("for each in f(3):\n    assert each == 9", "def f(n): return [n * n]", "def f(n): return []"),
        ("def verify(n):\n    assert n == 9\nfor each in f(3):\n    verify(each)", "def f(n): return [n * n]",
         "def f(n): return []"),
        ("found = f(3)\nif found:\n    assert found == 9", RIGHT, "def f(n): return 0"),
        ("def test_each(n):\n    assert n == 9\nassert f(1)\nfor each in f(3):\n    test_each(each)",
         "def f(n): return [n * n]", "def f(n): return [] if n == 3 else 1"),
    ],
)  # fmt: skip
async def test_a_program_that_avoids_the_assertions_is_wrong(sandbox, test, right, wrong):
    assert (await judged(sandbox, program(right, test_program=test))).score.outcome == reward_pb2.OUTCOME_CORRECT
    found = await judged(sandbox, program(wrong, test_program=test))
    assert found.score.outcome == reward_pb2.OUTCOME_INCORRECT and "reached" in found.score.reason, found


@pytest.mark.parametrize(
    "test",
    [
        "if f(2) != 4:\n    raise AssertionError",
        "try:\n    f(None)\nexcept TypeError:\n    pass\nelse:\n    assert False",
        "import sys\nsys.exit(0 if f(2) == 4 else 1)",
        "def unused(n):\n    assert n\nassert f(2) == 4",
        "def never():\n    assert False\nassert f(2) == 4\nif f(3) != 9:\n    never()",
        "class Stub:\n    def test(self, n): assert n\nstub = Stub\nassert f(2) == 4",
        "import unittest\nclass TestF(unittest.TestCase):\n    @unittest.skip('later')\n    def test_no(self): f()\n"
        "    def test_two(self): self.assertTrue(f(2) == 4)",
        "import unittest\nclass Base(unittest.TestCase):\n    def test_two(self): assert f(self.n) == 4\n"
        "class TestF(Base):\n    n = 2\ndel Base",
    ],
)
async def test_what_asserts_in_another_way_is_a_test(sandbox, test):
    found = await judged(sandbox, program(RIGHT, test_program=test))
    assert found.score.outcome == reward_pb2.OUTCOME_CORRECT, found
