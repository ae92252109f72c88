"""What crosses between a program and its tests: plain data of exact builtin types."""

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest

from quartet_reward.code.plain import (
    JUDGE_PROXIES,
    Decoder,
    Encoder,
    Handles,
    Malformed,
    ProgramObject,
    TooLarge,
)


def handles():
    return Handles(lambda *arguments: None, JUDGE_PROXIES)


def crossed(value):
    encoder = Encoder(handles())
    word = encoder.value(value)
    return Decoder(handles(), encoder.nodes()).value(word)


def kinds(value):
    """The types of a value, all the way down."""
    if isinstance(value, dict):
        return type(value), [(kinds(key), kinds(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [kinds(each) for each in value]
    return type(value)


PLAIN = [
    None, True, [1, True, 1.0, None, "a"], 2**200, [2**63, -(2**63), 1], -0.5, float("inf"), complex(1, -2),
    "\ud800 é", b"\x00\xff", bytearray(b"ab"), (1, (2, [3, (4,)])), {"a": [1, {"b": (2,)}], 3: None, (1, 2): "t"},
    {1, "a", (2, frozenset({3}))}, frozenset(), range(2, 20, 3), deque([1, [2]], 5), Counter("hello"),
    OrderedDict([("b", 1), ("a", 2)]), defaultdict(int, {"a": 1}), Decimal("1.10"), Fraction(1, 3),
    [int, str, type(None)], ..., [[[[]]], ([],), {}, set()], {"a": [1], (2,): None}.keys(),
    {"a": [1], (2,): None}.items(),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_crosses_as_it_is(value):
    came = crossed(value)
    assert came == value
    assert kinds(came) == kinds(value)


def test_what_comparison_does_not_see_crosses_too():
    ordered = OrderedDict([("b", 1), ("a", 2)])
    ordered.move_to_end("b")
    assert list(crossed(ordered)) == ["a", "b"]
    assert crossed(defaultdict(list))["x"] == []
    assert crossed(deque([1], 1)).maxlen == 1
    nan, values = crossed([float("nan"), OrderedDict(a=[1], b=2).values()])
    assert nan != nan and type(values) is type({}.values()) and list(values) == [[1], 2]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (IntEnum("Color", "RED").RED, 1),
        (namedtuple("Point", "x y")(1, 2), (1, 2)),
        (type("Own", (list,), {"__iter__": lambda self: iter("xyz")})([1]), [1]),
        (type("Own", (float,), {"__eq__": lambda s, o: True})(1.5), 1.5),
    ],
    ids=str,
)
def test_subclasses_cross_as_the_builtin_type(value, plain):
    came = crossed(value)
    assert type(came) is type(plain)
    assert came == plain and came != "something else"


def test_what_only_says_that_it_is_a_number_stays_an_object():
    assert type(crossed(type("Pretender", (), {"__class__": property(lambda self: int)})())) is ProgramObject


def test_sharing_and_cycles_survive():
    shared = [1]
    came = crossed([shared, shared, {"x": shared}])
    came[0].append(2)
    assert came == [[1, 2], [1, 2], {"x": [1, 2]}]
    ring = []
    ring.append(ring)
    came = crossed(ring)
    assert came[0] is came


def test_nested_too_deep_is_refused():
    deep = ()
    for _ in range(100):
        deep = (deep,)
    with pytest.raises(TooLarge, match="tuples nested deeper"):
        crossed(deep)
    lists = []
    for _ in range(5000):
        lists = [lists]
    came = crossed(lists)  # lists are entries of a table: no recursion
    for _ in range(5000):
        (came,) = came
    assert came == []


@pytest.mark.parametrize(
    ("word", "nodes"),
    [
        (["#", 0], []), (["#", -1], [["list", []]]), (["tuple", {"a": 1}], []), (["int", "12x"], []),
        (["keys", ["#", 0]], [["list", []]]), (["range", 1, 2, 0], []), (["type", "Exception"], []), (["mine", 0], []),
        (["yours", 10**9, "object"], []), (["unknown"], []), ({"a": 1}, []), (1, None), (1, [["list", [1], 2]]),
        (1, [["dict", [1]]]), (1, [["set", [["#", 0]]]]), (1, [["os.system", ["ls"]]]), (1, [7]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_value_is_malformed(word, nodes):
    with pytest.raises(Malformed):
        Decoder(handles(), nodes).value(word)
