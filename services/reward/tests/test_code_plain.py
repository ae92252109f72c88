"""What crosses between a program and its tests: plain data of exact builtin types, and calls both ways."""

import socket
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest

from quartet_reward.code.channel import Channel, Gone, Malformed, TooLarge
from quartet_reward.code.handles import Handles
from quartet_reward.code.peer import Peer
from quartet_reward.code.plain import Decoder, Encoder
from quartet_reward.code.proxies import JUDGE_PROXIES, OPAQUE_PROXIES, ProgramIterator, ProgramObject


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
    None,
    True,
    [1, True, 1.0, None, "a"],
    2**200,
    [2**63, -(2**63), 1],
    -0.5,
    float("inf"),
    complex(1, -2),
    "\ud800 é",
    b"\x00\xff",
    bytearray(b"ab"),
    (1, (2, [3, (4,)])),
    {"a": [1, {"b": (2,)}], 3: None, (1, 2): "t"},
    {1, "a", (2, frozenset({3}))},
    frozenset(),
    range(2, 20, 3),
    deque([1, [2]], 5),
    Counter("hello"),
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(int, {"a": 1}),
    Decimal("1.10"),
    Fraction(1, 3),
    [int, str, type(None)],
    ...,
    [[[[]]], ([],), {}, set()],
    {"a": [1], (2,): None}.keys(),
    {"a": [1], (2,): None}.items(),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_crosses_as_it_is(value):
    came = crossed(value)
    assert came == value
    assert kinds(came) == kinds(value)


def test_the_values_of_a_dict_cross():
    came = crossed(OrderedDict(a=[1], b=2).values())
    assert type(came) is type({}.values())
    assert list(came) == [[1], 2]


def test_what_a_number_is_not_crosses_too():
    came = crossed([float("nan"), 1])
    assert came[0] != came[0]


def test_order_and_factory_survive():
    ordered = OrderedDict([("b", 1), ("a", 2)])
    ordered.move_to_end("b")
    assert list(crossed(ordered)) == ["a", "b"]
    assert crossed(defaultdict(list))["x"] == []
    assert crossed(deque([1], 1)).maxlen == 1


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


class Color(IntEnum):
    RED = 1


class Text(str):
    def __str__(self):
        return "another"


class Pretender:
    @property
    def __class__(self):
        return int


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Liar(5), 5),
        (Color.RED, 1),
        (Text("a"), "a"),
        (namedtuple("Point", "x y")(1, 2), (1, 2)),
        (type("Own", (dict,), {})(a=1), {"a": 1}),
        (type("Own", (list,), {"__iter__": lambda self: iter("xyz")})([1]), [1]),
        (type("Own", (float,), {"__eq__": lambda s, o: True})(1.5), 1.5),
    ],
    ids=str,
)
def test_subclasses_cross_as_the_builtin_type(value, plain):
    came = crossed(value)
    assert type(came) is type(plain)
    assert came == plain
    assert came != "something else"


def test_what_only_says_that_it_is_a_number_stays_an_object():
    assert type(crossed(Pretender())) is ProgramObject


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
        (["#", 0], []),
        (["#", -1], [["list", []]]),
        (["#", "0"], [["list", []]]),
        (["tuple", {"a": 1}], []),
        (["frozenset", ["#", 0]], [["list", []]]),
        (["int", "12x"], []),
        (["complex", 1, 2], []),
        (["keys", ["#", 0]], [["list", []]]),
        (["items", 1], []),
        (["range", 1, 2, 0], []),
        (["range", 1.5, 2, 1], []),
        (["Fraction", 1, 0], []),
        (["Decimal", "one"], []),
        (["type", "Exception"], []),
        (["mine", 0], []),
        (["yours", 0, "file"], []),
        (["yours", 10**9, "object"], []),
        (["unknown"], []),
        ([], []),
        ({"a": 1}, []),
        (1, None),
        (1, [["list", [1], 2]]),
        (1, [["list", {"a": 1}]]),
        (1, [["list", [{"a": 1}]]]),
        (1, [["dict", [1]]]),
        (1, [["dict", [["#", 0], 1]]]),
        (1, [["set", [["#", 0]]]]),
        (1, [["deque", [], -1]]),
        (1, [["defaultdict", [], ["type", "Exception"]]]),
        (1, [["Counter"]]),
        (1, [["os.system", ["ls"]]]),
        (1, [7]),
    ],
    ids=str,
)
def test_what_is_no_value_is_malformed(word, nodes):
    with pytest.raises(Malformed):
        Decoder(handles(), nodes).value(word)


def serve(target, operation, arguments, named):
    """What both sides let the other do to their objects here."""
    return next(target) if operation == "next" else target(*arguments, **named)


class Pair:
    """A judge's and a program's peer, joined; the program's side runs in a thread."""

    def __init__(self, functions):
        self._sockets = socket.socketpair()
        ours, theirs = (Channel(each.fileno()) for each in self._sockets)

        def serve_program(target, operation, arguments, named):
            if target is None:
                return functions[operation](*arguments, **named)
            return serve(target, operation, arguments, named)

        self.judge = Peer(ours, serve, JUDGE_PROXIES)
        self._program = Peer(theirs, serve_program, OPAQUE_PROXIES)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._program.serve_forever()
        except Gone:
            return

    def close(self):
        self._sockets[0].shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        for each in self._sockets:
            each.close()


@pytest.fixture
def pair():
    made = []

    def make(**functions):
        made.append(Pair(functions))
        return made[-1].judge

    yield make
    for each in made:
        each.close()


def test_changed_arguments_are_changed_here_too(pair):
    def change(numbers, table, unchanged):
        numbers.sort()
        table["new"] = [numbers]
        return numbers

    judge = pair(change=change)
    numbers, table, unchanged = [3, 1, 2], {"old": 1}, {1, 2}
    result = judge.ask(None, "change", numbers, table, unchanged)
    assert numbers == [1, 2, 3]
    assert result is numbers
    assert table == {"old": 1, "new": [numbers]}
    assert table["new"][0] is numbers
    assert unchanged == {1, 2}


def test_a_change_of_type_alone_is_a_change(pair):
    judge = pair(change=lambda numbers: numbers.__setitem__(0, True))
    numbers = [1]
    judge.ask(None, "change", numbers)
    assert numbers[0] is True


def test_exceptions_cross_by_their_builtin_name(pair):
    class Own(KeyError):
        pass

    def fail(name):
        raise {"own": Own("a", 1), "decode": UnicodeDecodeError("utf-8", b"x", 0, 1, "why")}[name]

    judge = pair(fail=fail)
    with pytest.raises(KeyError) as caught:
        judge.ask(None, "fail", "own")
    assert caught.value.args == ("a", 1)
    assert caught.value.from_other_side
    with pytest.raises(UnicodeDecodeError):
        judge.ask(None, "fail", "decode")


def test_functions_and_iterators_cross_both_ways(pair):
    def apply(function, items):
        return (function(each) for each in items)

    judge = pair(apply=apply)
    result = judge.ask(None, "apply", lambda each: each + 1, iter([1, 2, 3]))
    assert type(result) is ProgramIterator
    assert next(result) == 2
    assert list(result) == [3, 4]


def test_an_object_of_the_other_side_equals_only_itself(pair):
    class Yes:
        def __eq__(self, other):
            return True

        __hash__ = None

    yes = Yes()
    judge = pair(yes=lambda: yes)
    came = judge.ask(None, "yes")
    assert came != 1
    assert came == judge.ask(None, "yes")


def test_calls_do_not_nest_for_ever(pair):
    judge = pair(again=lambda function: function(function))

    def again(function):
        return judge.ask(None, "again", function)

    with pytest.raises(RecursionError):
        again(again)


@pytest.mark.parametrize(
    "message",
    [
        b"\x7f\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x03{]}",
        b"\x00\x00\x00\x0c" + b'{"answer":9}',
        b"\x00\x00\x00\x0e" + b'{"question":1}',
    ],
    ids=str,
)
def test_frames_that_are_no_answers_are_malformed(message):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(message)
        judge = Peer(Channel(ours.fileno()), lambda *arguments: None, JUDGE_PROXIES)
        with pytest.raises(Malformed):
            judge.ask(None, "find", "f")


def test_the_end_of_the_connection_is_told():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(Gone):
        Channel(ours.fileno()).receive()
