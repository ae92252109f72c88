"""Plain data as JSON: what comes out has exact builtin types, whatever class its sender made it of.

A message holds `value` and a table `nodes` of the containers that can be changed: they refer to each other by number,
so that sharing and cycles survive, and so that an answer can tell what became of the containers of the question.

| encoded | is |
|---|---|
| null, true, 1, 2.5, "text" | itself; NaN and the infinities too |
| ["#", i] | container i of the table |
| ["int", hex], ["complex", re, im], ["bytes", latin-1], ["range", start, stop, step], ["..."] | |
| ["tuple", …], ["frozenset", …] | values |
| ["keys" \\| "values" \\| "items", …] | a dict's view, of the values in it |
| ["Decimal", text], ["Fraction", n, d], ["type", name] | |
| ["mine" \\| "yours", …] | see `handles` |
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from quartet_reward.code.channel import Malformed, TooLarge
from quartet_reward.code.proxies import Handles, Remote

_DEEPEST_TUPLE = 60
_INT64 = 1 << 63
_AS_THEY_ARE = frozenset({type(None), bool, str, float})
_TYPES = {
    each.__name__: each
    for each in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object, range)
} | {"NoneType": type(None)}
_TYPE_NAMES = {each: name for name, each in _TYPES.items()}
# In this order: a class comes before what it is derived from.
_CONTAINERS: tuple[type, ...] = (Counter, OrderedDict, defaultdict, dict, list, set, deque, bytearray)
_CONTAINER_NAMES = {each.__name__: each for each in _CONTAINERS}
_EXACT_CONTAINERS = frozenset(_CONTAINERS)


class Encoder:
    """Encodes the values of one message, which share one table."""

    def __init__(self, handles: Handles, known: list[Any] | None = None):
        """`known`: containers that the receiver has already, by their numbers."""
        self._handles = handles
        self.containers = list(known or ())
        self._first = len(self.containers)
        self._numbers = {id(container): number for number, container in enumerate(self.containers)}
        self._done = self._first
        self._nodes: list[list] = []

    def value(self, thing: Any, depth: int = 0) -> Any:
        """Return a value's word; its containers go to the table. Raises TooLarge."""
        kind: Any = type(thing)
        if kind in _AS_THEY_ARE:
            return thing
        if kind is int:
            return thing if -_INT64 <= thing < _INT64 else ["int", f"{thing:x}"]
        if kind in _EXACT_CONTAINERS:
            return ["#", self._number(thing)]
        if kind is tuple or kind is frozenset:
            if depth > _DEEPEST_TUPLE:
                raise TooLarge(f"tuples nested deeper than {_DEEPEST_TUPLE}")
            return [kind.__name__, *(self.value(each, depth + 1) for each in thing)]
        return self._seldom(thing, depth)

    def _seldom(self, thing: Any, depth: int) -> Any:
        if thing is Ellipsis:
            return ["..."]
        if type(thing) is type and thing in _TYPE_NAMES:
            return ["type", _TYPE_NAMES[thing]]
        # By the classes that it is derived from: what it calls its __class__ may be a lie.
        for base in type(thing).__mro__:
            if base in _EXACT_CONTAINERS:
                return ["#", self._number(thing)]
            if base in _SELDOM:
                return _SELDOM[base](self, thing, depth)
        return self._handles.encode(thing)

    def nodes(self) -> list[list]:
        """Return the table: the containers that the receiver did not know."""
        while self._done < len(self.containers):
            self._nodes.append(self.node(self.containers[self._done]))
            self._done += 1
        return self._nodes

    def node(self, container: Any) -> list:
        """Return what a container holds."""
        kind: Any = next(each for each in type(container).__mro__ if each in _EXACT_CONTAINERS)
        if kind is bytearray:
            return [kind.__name__, bytes(container).decode("latin-1")]
        if issubclass(kind, dict):
            items = [each for pair in kind.items(container) for each in pair]
        else:
            items = list(kind.__iter__(container))
        kinds = set(map(type, items))
        if kinds <= _AS_THEY_ARE or (kinds == {int} and min(items) >= -_INT64 and max(items) < _INT64):
            words = items
        else:
            words = [self.value(each) for each in items]
        extra = []
        if kind is deque:
            extra = [self.value(container.maxlen)]
        elif kind is defaultdict:
            factory = container.default_factory
            extra = [self.value(factory if type(factory) is type and factory in _TYPE_NAMES else None)]
        return [kind.__name__, words, *extra]

    def _number(self, container: Any) -> int:
        number = self._numbers.get(id(container))
        if number is None:
            number = self._numbers[id(container)] = len(self.containers)
            self.containers.append(container)
        return number


# How what is no container crosses. A subclass of a builtin type crosses as that type, by the type's methods, as its own
# may lie. What it is made of is encoded in turn.
_SELDOM: dict[type, Callable[[Encoder, Any, int], Any]] = {
    int: lambda encoder, thing, depth: encoder.value(int.__index__(thing)),
    float: lambda encoder, thing, depth: float.__float__(thing),
    str: lambda encoder, thing, depth: str.__str__(thing),
    complex: lambda encoder, thing, depth: ["complex", *_parts(complex.__complex__(thing))],
    bytes: lambda encoder, thing, depth: ["bytes", bytes.decode(thing, "latin-1")],
    tuple: lambda encoder, thing, depth: encoder.value(tuple(tuple.__iter__(thing)), depth),
    frozenset: lambda encoder, thing, depth: encoder.value(frozenset(frozenset.__iter__(thing)), depth),
    range: lambda encoder, thing, depth: ["range", *map(encoder.value, (thing.start, thing.stop, thing.step))],
    Decimal: lambda encoder, thing, depth: ["Decimal", Decimal.__str__(thing)],
    Fraction: lambda encoder, thing, depth: [
        "Fraction",
        encoder.value(Fraction.numerator.fget(thing)),  # type: ignore[attr-defined]
        encoder.value(Fraction.denominator.fget(thing)),  # type: ignore[attr-defined]
    ],
    type({}.keys()): lambda encoder, thing, depth: ["keys", *(encoder.value(each, depth + 1) for each in thing)],
    type({}.values()): lambda encoder, thing, depth: ["values", *(encoder.value(each, depth + 1) for each in thing)],
    type({}.items()): lambda encoder, thing, depth: ["items", *(encoder.value(each, depth + 1) for each in thing)],
    Remote: lambda encoder, thing, depth: encoder._handles.encode(thing),
}


def _parts(number: complex) -> tuple[float, float]:
    return number.real, number.imag


class Decoder:
    """Decodes the values of one message."""

    def __init__(self, handles: Handles, nodes: Any, known: list[Any] | None = None):
        """`known`: the containers with the first numbers. Raises Malformed."""
        self._handles = handles
        self.containers = list(known or ())
        first = len(self.containers)
        if type(nodes) is not list:
            raise Malformed("a table of containers is a list")
        self.containers += [self._empty(node) for node in nodes]
        for number, node in enumerate(nodes, first):
            self.fill(number, node)

    def value(self, word: Any, depth: int = 0) -> Any:
        """Return the value of a word. Raises Malformed."""
        if type(word) is not list:
            if type(word) is dict:
                raise Malformed("an object where a value is expected")
            return word
        if depth > _DEEPEST_TUPLE + 2:
            raise Malformed("values nested too deep")
        try:
            return self._tagged(word, depth)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise Malformed(f"{str(word)[:80]} is no value: {error}") from None

    def _tagged(self, word: list, depth: int) -> Any:
        match word:
            case ["#", int(number)] if 0 <= number < len(self.containers):
                return self.containers[number]
            case ["tuple", *rest]:
                return tuple([self.value(each, depth + 1) for each in rest])
            case ["frozenset", *rest]:
                return frozenset([self.value(each, depth + 1) for each in rest])
            case ["keys", *rest]:
                return {self.value(each, depth + 1): None for each in rest}.keys()
            case ["values", *rest]:
                return {number: self.value(each, depth + 1) for number, each in enumerate(rest)}.values()
            case ["items", *rest]:
                return dict(self.value(each, depth + 1) for each in rest).items()
            case ["int", str(text)]:
                return int(text, 16)
            case ["complex", float(real), float(imaginary)]:
                return complex(real, imaginary)
            case ["bytes", str(text)]:
                return text.encode("latin-1")
            case ["range", start, stop, step]:
                return range(*(_whole(self.value(each)) for each in (start, stop, step)))
            case ["Decimal", str(text)]:
                return Decimal(text)
            case ["Fraction", numerator, denominator]:
                return Fraction(_whole(self.value(numerator)), _whole(self.value(denominator)))
            case ["type", str(name)] if name in _TYPES:
                return _TYPES[name]
            case ["..."]:
                return ...
            case ["mine" | "yours", *_]:
                return self._handles.decode(word)
        raise Malformed(f"{str(word)[:80]} is no value")

    def fill(self, number: Any, node: Any) -> None:
        """Make a container hold what a node says, and nothing else. Raises Malformed."""
        if type(number) is not int or not 0 <= number < len(self.containers):
            raise Malformed(f"no container has the number {str(number)[:80]}")
        container: Any = self.containers[number]
        if type(node) is not list or len(node) < 2 or not issubclass(type(container), _named(node[0])):
            raise Malformed(f"container {number} is no {str(node)[:80]}")
        try:
            if isinstance(container, bytearray):
                container[:] = node[1].encode("latin-1")
                return
            items = [self.value(each) if type(each) in (list, dict) else each for each in node[1]]
            container.clear()
            if isinstance(container, dict):
                for key, value in zip(items[::2], items[1::2], strict=True):
                    container[key] = value
            elif isinstance(container, set):
                container.update(items)
            else:
                container.extend(items)
        except (TypeError, ValueError, AttributeError) as error:
            raise Malformed(f"container {number} cannot hold what it is said to: {error}") from None

    def _empty(self, node: Any) -> Any:
        match node:
            case ["deque", list(), None]:
                return deque()
            case ["deque", list(), int(most)] if most >= 0:
                return deque(maxlen=most)
            case ["defaultdict", list(), factory]:
                made_by = self.value(factory)
                if made_by is None or made_by in _TYPES.values():
                    return defaultdict(made_by)
            case ["bytearray", str()]:
                return bytearray()
            case [str(name), list()] if name in _CONTAINER_NAMES:
                return _CONTAINER_NAMES[name]()
        raise Malformed(f"{str(node)[:80]} is no container")


def _named(name: Any) -> type:
    kind = _CONTAINER_NAMES.get(name) if type(name) is str else None
    if kind is None:
        raise Malformed(f"{str(name)[:80]} is no kind of container")
    return kind


def _whole(thing: Any) -> int:
    if type(thing) is not int:
        raise Malformed(f"{str(thing)[:80]} is no whole number")
    return thing
