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
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal


class Malformed(Exception):
    """What came is not what the other side of the protocol may send."""


class TooLarge(Exception):
    """What was to be sent exceeds a limit."""


class NotPlain(Exception):
    """What was to be sent is an object, and none is to cross."""


_MOST_HANDLES = 100_000

Kind = Literal["callable", "iterator", "object"]


class Remote:
    """Stands for an object of the other side. Equal to nothing but itself: its holder has no say in that."""

    __slots__ = ("_ask", "_number")

    def __init__(self, number: int, ask: Callable[..., Any]):
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_ask", ask)


class Handles:
    """The objects that this side has lent, and the proxies of those that it was lent."""

    def __init__(self, ask: Callable[..., Any], proxies: dict[Kind, type[Remote]], lends_objects: bool = True):
        """
        Args:
            ask: called by proxies as ask(number, operation, *arguments).
            proxies: the class that stands for each kind of object.
            lends_objects: what is neither a function nor an iterator is lent too.
        """
        self._ask = ask
        self._proxies = proxies
        self._lends_objects = lends_objects
        self._lent: list[tuple[Any, Kind]] = []
        self._numbers: dict[int, int] = {}
        self._borrowed: dict[int, Remote] = {}

    def encode(self, thing: Any) -> list:
        """Return the wire's word for an object that is no plain data.

        Raises:
            NotPlain: objects are not lent.
            TooLarge: too many were.
        """
        if isinstance(thing, Remote):
            return ["mine", object.__getattribute__(thing, "_number")]
        number = self._numbers.get(id(thing))
        if number is None:
            kind = _kind(thing)
            if kind == "object" and not self._lends_objects:
                raise NotPlain(f"an object of {type(thing).__name__}; strict mode passes data, functions and iterators")
            if len(self._lent) >= _MOST_HANDLES:
                raise TooLarge(f"more than {_MOST_HANDLES} objects that are no plain data")
            number = self._numbers[id(thing)] = len(self._lent)
            self._lent.append((thing, kind))
        return ["yours", number, self._lent[number][1]]

    def decode(self, word: list) -> Any:
        """Return the object that a word stands for. Raises Malformed."""
        match word:
            case ["mine", int(number)] if 0 <= number < len(self._lent):
                return self._lent[number][0]
            case ["yours", int(number), str(kind)] if kind in self._proxies and 0 <= number < _MOST_HANDLES:
                if number not in self._borrowed:
                    self._borrowed[number] = self._proxies[kind](number, self._ask)
                return self._borrowed[number]
        raise Malformed(f"no object is called {str(word)[:80]}")

    def lent(self, number: Any) -> tuple[Any, Kind]:
        """Return an object of this side. Raises Malformed if none has this number."""
        if type(number) is not int or not 0 <= number < len(self._lent):
            raise Malformed(f"no object has the number {str(number)[:80]}")
        return self._lent[number]


def _kind(thing: Any) -> Kind:
    if callable(thing):
        return "callable"
    return "iterator" if hasattr(type(thing), "__next__") else "object"


def _ask(proxy: Remote, operation: str, *arguments: Any, **named: Any) -> Any:
    return object.__getattribute__(proxy, "_ask")(
        object.__getattribute__(proxy, "_number"), operation, *arguments, **named
    )


class RemoteFunction(Remote):
    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "call", *arguments, **named)


class RemoteIterator(Remote):
    """An iterator or generator; each item is asked for when it is needed."""

    __slots__ = ()

    def __iter__(self) -> "RemoteIterator":
        return self

    def __next__(self) -> Any:
        return _ask(self, "next")


class OpaqueObject(Remote):
    """Another object of the other side, which can only be passed on or given back."""

    __slots__ = ()


OPAQUE_PROXIES: dict[Kind, type[Remote]] = {
    "callable": RemoteFunction,
    "iterator": RemoteIterator,
    "object": OpaqueObject,
}


class ProgramObject(Remote):
    """An object of the program that is no plain data. Comparisons know only whether it is the same object."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        # Special methods are what the language asks for, not what tests name; the few that make sense are below.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "set_item", key, value)

    def __contains__(self, key: Any) -> bool:
        return _of_type(bool, _ask(self, "contains", key))

    def __len__(self) -> int:
        return _of_type(int, _ask(self, "len"))

    def __bool__(self) -> bool:
        return _of_type(bool, _ask(self, "bool"))

    def __str__(self) -> str:
        return _of_type(str, _ask(self, "str"))

    def __repr__(self) -> str:
        return _of_type(str, _ask(self, "repr"))

    def __iter__(self) -> Iterator[Any]:
        iterator = _ask(self, "iter")
        if not isinstance(iterator, ProgramIterator):
            raise TypeError("the program's object has no iterator")
        return iterator


class ProgramIterator(RemoteIterator, ProgramObject):
    __slots__ = ()


class ProgramCallable(RemoteFunction, ProgramObject):
    __slots__ = ()


JUDGE_PROXIES: dict[Kind, type[Remote]] = {
    "callable": ProgramCallable,
    "iterator": ProgramIterator,
    "object": ProgramObject,
}


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the program's object gives {type(value).__name__} where {kind.__name__} is required")
    return value


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
