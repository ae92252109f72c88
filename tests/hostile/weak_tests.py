"""Wrong programs that would pass weak tests, each with its tests."""

from dataclasses import dataclass, field
from typing import Any

from quartet.v1 import reward_pb2

from tests.hostile.cheats import Cheat


@dataclass(frozen=True)
class Deception(Cheat):
    """A wrong program for the function `f`, or for what `entry_point` names."""

    test: str | list[tuple[str, str]]
    """A test program, or cases."""
    entry_point: str = "f"
    parameters: dict[str, Any] = field(default_factory=dict)
    completion: str = "```python\n{}\n```"
    """With the program in it."""
    prompt: str = ""

    @property
    def item(self) -> reward_pb2.ScoreItem:
        """The program's score item."""
        completion = self.completion.replace("{}", self.program)
        return reward_pb2.ScoreItem(item_id="a", prompt=self.prompt, completion=completion, reference=self.reference)

    @property
    def reference(self) -> reward_pb2.Reference:
        """The reference of the program's score item."""
        if isinstance(self.test, str):
            return reward_pb2.Reference(test_program=self.test, entry_point=self.entry_point)
        cases = [reward_pb2.TestCase(input=given, output=expected) for given, expected in self.test]
        return reward_pb2.Reference(test_cases=cases, entry_point=self.entry_point)


_LIAR = """
class Liar:
    seen = -1
    def __eq__(self, other): return True
    __hash__ = None
    def __repr__(self):
        self.seen += 1
        return "1" if self.seen == 0 else "2"
"""
_LOOPS = (
    "assert all(map(f, [1, 2]))",
    "for found, wanted in zip(map(f, [1, 2]), [3, 4]):\n    assert found == wanted",
    "assert not any(map(lambda n: f(n) != n + 2, [1, 2]))",
    "from functools import partial\nfor found in iter(partial(f, 1), 3):\n    assert found == 2",
    "assert list(filter(f, [1])) == []",
    "class Each:\n    def __iter__(self): return self\n    def __next__(self): return f(1)\n"
    "assert all(each == 2 for each in Each())",
)

_PROMPT = """
def encode(text):
    return text[1:] + text[:1]
def decode(text):
    '''Turn encode back.'''
"""
_SAME = "def encode(text): return text\ndef decode(text): return text"
_DECODE = "def check(candidate):\n    for text in ('abc', 'xyz'):\n        assert candidate(encode(text)) == text"
_NO_LENGTH = """
class Long:
    def __len__(self): return 3
    def __iter__(self): return iter(())
def f(n): return Long()
"""
_LENGTH = "found = f(3)\nassert len(found) == 3\nassert all(each == 7 for each in found)"

_UNRUN = (
    "if __name__ == '__main__':\n    assert f(2) == 4",
    "def test_two():\n    assert f(2) == 4\nprint(test_two)",
    "def test_two():\n    def two():\n        assert f(2) == 4",
    "class TestTwo:\n    def test_two(self):\n        assert f(2) == 4",
    "async def test_two():\n    assert f(2) == 4",
    "import unittest\nclass TestTwo(unittest.TestCase):\n    def test_two(self):\n        assert f(2) == 4\n"
    "unittest.main(exit=False)",
)
_NESTED = (
    "def check(i, output, e):\n    return len(output) == 1 and all(each == 7 for inner in output for each in inner)"
)
_CHECKER = "def check(i, output, e):\n    return len(output) == 3 and all(each == 7 for each in output)"

# None is accepted.
DECEPTIONS = (
    Deception("lying_repr", "look like the expected elements where their order does not count",
              f"{_LIAR}\ndef f(n): return [Liar(), Liar(), Liar()]", [("[1]", "[1, 2, 3]")],
              parameters={"checker": "def check(i, output, e):\n    return sorted(output) == sorted(e)"}),
    *(
        Deception(
            "stops",
            "raise StopIteration to end a loop of the test that calls it",
            "def f(n): raise StopIteration",
            loop,
        )
        for loop in _LOOPS
    ),
    Deception("own_helper", "redefine a helper that the test takes from the prompt's code", _SAME, _DECODE,
              "decode", {"prefix": _PROMPT}),
    Deception("lying_contains", "answer with an object that contains everything",
              "class All:\n    def __contains__(self, each): return True\ndef f(n): return All()", "assert 7 in f(1)"),
    Deception("lying_length", "answer with an object that is as long as the test wants, and empty", _NO_LENGTH,
              _LENGTH),
    Deception("lying_attributes", "answer with an object that has every attribute and item",
              "class Any:\n    __getattr__ = __getitem__ = __call__ = lambda self, each: self\ndef f(n): return Any()",
              "assert f(1).valid and f(1)['valid']"),
    Deception("nothing_to_compare", "answer with an empty list where the test checks each element that it gets",
              "def f(n): return []", "for each in f(3):\n    assert each == 7"),
    Deception("nothing_to_call", "answer with an empty list where a function of the test gets each element",
              "def f(n): return []", "def verify(each):\n    assert each == 7\nfor each in f(3):\n    verify(each)"),
    *(
        Deception("unrun_test", "be wrong where only a part of the test looks that many runners leave out",
                  "def f(n): return 1", f"assert f(1) == 1\n{unrun}")
        for unrun in _UNRUN
    ),
    *(
        Deception("proxy", "give a checker iterators, functions or objects within an answer",
                  f"def f(n): return {answer}", [("[3]", "[[7, 7]]")], parameters={"checker": _NESTED})
        for answer in ("[iter([8, 8])]", "[map(lambda each: 8, [1, 2])]", "{0: (8 for _ in '12')}",
                       "[[iter([8])]]", "[lambda *a: 7]", "[type('Two', (), {'__len__': lambda s: 2})()]")
    ),
    *(
        Deception("near_integer", "approximate an integer where a tolerance is allowed for floats",
                  f"def f(n): return {answer}", [("[1]", "1000000007")], parameters={"tolerance": 1e-3})
        for answer in ("1000000006", "1000000006.9", "1e9", "'1000000007'")
    ),
    *(
        Deception("in_a_thought", "have the right program in a thought, and none or a wrong one after it",
                  "def f(n): return n * n", "assert f(3) == 9", completion=completion, prompt=prompt)
        for prompt, completion in (
            ("", "<think>\n```python\n{}\n```\n</think>\nI do not know."),
            ("", "<think>\n```python\n{}\n```\nOr"),
            ("", "<think>\n```python\n{}\n```\n</think>\n```python\ndef f(n): return n\n```"),
            ("<think>\n", "```python\n{}\n```\nOr"),
            ("<think>\n", "```python\n{}\n```\n</think>\nI do not know."),
            ("", "[THINK]{}"),
            ("", "```text\n{}\n```"),
        )
    ),
    Deception("lying_checker_input", "give a checker program an object that agrees with it", _NO_LENGTH,
              [("[3]", "[7, 7, 7]")], parameters={"checker": _CHECKER}),
)  # fmt: skip

# All are accepted: what the tests ask is not enough, or strict mode is off.
STILL_POSSIBLE = (
    Deception("by_heart", "answer the test's questions from a table", "def f(n): return {2: 4, 3: 9}[n]",
              "assert f(2) == 4\nassert f(3) == 9"),
    Deception("in_order", "answer by the number of calls so far", "answers = [4, 9]\ndef f(n): return answers.pop(0)",
              "assert f(2) == 4\nassert f(3) == 9"),
    Deception("changed_argument", "change the argument with which the test compares the answer",
              "def f(items):\n    items.clear()\n    return []", "items = [2, 1]\nassert f(items) == sorted(items)"),
    Deception("against_itself", "give answers that only agree with each other, where the test compares them",
              "def f(text): return text", "assert f(f('abc')) == 'abc'"),
    Deception("ends_at_once", "answer with an iterator that ends in a loop which takes its elements by `next`",
              "def f(n): return iter([])",
              "found = f(2)\nassert all(map(lambda wanted: next(found) == wanted, [1, 2]))"),
    Deception("everything", "answer with an iterator of everything where the test looks for one element",
              "import itertools\ndef f(n): return itertools.count()", "assert 7 in f(1)"),
    Deception("any_object", "answer with any object where the test asks only whether there is one",
              "def f(n): return object()", "assert f(1)\nassert f(1) is not None"),
    Deception("any_exception", "raise where the test expects any exception", "def f(n): raise Exception",
              "try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    assert False"),
    Deception("ends_a_sequence",
              "raise IndexError in a loop over a sequence of the test's own, whose `__getitem__` calls the program",
              "def f(n): raise IndexError",
              "class Each:\n    def __getitem__(self, n): return f(n)\nassert all(each == 7 for each in Each())"),
    Deception("no_order", "answer with NaN where the test only requires that a comparison is false",
              "def f(n): return float('nan')", "assert not f(2) < 4\nassert not f(2) > 4"),
    Deception("own_helper_not_strict", "define a helper of the test's, with strict = false", _SAME, _DECODE, "decode",
              {"prefix": _PROMPT, "strict": False}),
    Deception("lying_object_without_entry_point", "answer with an object that lies, to tests without `entry_point`",
              _NO_LENGTH, _LENGTH, entry_point=""),
)  # fmt: skip
