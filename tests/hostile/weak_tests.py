"""Wrong programs that deceive tests which trust what they are given, each with the tests that it is for."""

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

    @property
    def reference(self) -> reward_pb2.Reference:
        """What the program is judged by."""
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
_STOPS = "def f(*given): raise StopIteration"
_LOOPS = (
    "assert all(map(f, [1, 2]))",
    "for found, wanted in zip(map(f, [1, 2]), [3, 4]):\n    assert found == wanted",
    "assert not any(map(lambda n: f(n) != n + 2, [1, 2]))",
    "from functools import partial\nfor found in iter(partial(f, 1), 3):\n    assert found == 2",
    "assert list(filter(f, [1])) == []",
    "class Each:\n    def __iter__(self): return self\n    def __next__(self): return f(1)\n"
    "assert all(each == 2 for each in Each())",
)

# None is accepted.
DECEPTIONS = (
    Deception(
        "lying_repr",
        "look like the expected elements where their order does not count",
        f"{_LIAR}\ndef f(n): return [Liar(), Liar(), Liar()]",
        [("[1]", "[1, 2, 3]")],
        parameters={"any_order": True},
    ),
    *(
        Deception("stops", "raise StopIteration to end a loop of the test that calls it", _STOPS, loop)
        for loop in _LOOPS
    ),
)
