"""Plain data as JSON: what comes out has exact builtin types, whatever class its sender made it of.

A message holds `value` and a table `nodes` of the containers that can be changed: they refer to each other by number,
so that sharing and cycles survive, and so that an answer can tell what became of the containers of the question.

| encoded | is |
|---|---|
| null, true, 1, 2.5, "text" | itself; NaN and the infinities too |
| ["#", i] | container i of the table |
| ["int", hex], ["type", name] | |
| [name, part, …] | a value of parts: see `_FORMS` |
| ["mine" \\| "yours", …] | see `Handles` |
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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


_DEEPEST = 60
_INT64 = 1 << 63
_AS_THEY_ARE = frozenset({type(None), bool, str, float})
# What is derived from one of these crosses as that type, by the type's own method: another one may lie.
_EXACTLY: dict[type, Callable[[Any], Any]] = {int: int.__index__, float: float.__float__, str: str.__str__}
_TYPES = {
    each.__name__: each
    for each in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object, range)
} | {"NoneType": type(None)}
_TYPE_NAMES = {each: name for name, each in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class _Form:
    """How a value crosses that cannot be changed: as its name and its parts, each of which is a value in turn."""

    name: str
    take_apart: Callable[[Any], Iterable[Any]]
    put_together: Callable[..., Any]
    parts: tuple[type, ...] | None = None
    """Their exact types; None: any parts, however many."""


_FORMS: dict[type, _Form] = {
    tuple: _Form("tuple", tuple.__iter__, lambda *parts: parts),
    frozenset: _Form("frozenset", frozenset.__iter__, lambda *parts: frozenset(parts)),
    complex: _Form("complex", lambda thing: _real_and_imaginary(complex.__complex__(thing)), complex, (float, float)),
    bytes: _Form("bytes", lambda thing: [bytes.decode(thing, "latin-1")], lambda text: text.encode("latin-1"), (str,)),
    range: _Form("range", lambda thing: (thing.start, thing.stop, thing.step), range, (int, int, int)),
    Decimal: _Form("Decimal", lambda thing: [Decimal.__str__(thing)], Decimal, (str,)),
    Fraction: _Form(
        "Fraction",
        lambda thing: [Fraction.numerator.fget(thing), Fraction.denominator.fget(thing)],  # type: ignore[attr-defined]
        Fraction,
        (int, int),
    ),
    type({}.keys()): _Form("keys", iter, lambda *parts: dict.fromkeys(parts).keys()),
    type({}.values()): _Form("values", iter, lambda *parts: dict(enumerate(parts)).values()),
    type({}.items()): _Form("items", iter, lambda *parts: dict(parts).items()),
    type(...): _Form("...", lambda thing: (), lambda: ..., ()),
}
_FORM_NAMES = {form.name: form for form in _FORMS.values()}
# In this order: a class comes before what it is derived from.
_CONTAINERS: tuple[type, ...] = (Counter, OrderedDict, defaultdict, dict, list, set, deque, bytearray)
_CONTAINER_NAMES = {each.__name__: each for each in _CONTAINERS}
_EXACT_CONTAINERS = frozenset(_CONTAINERS)


def _real_and_imaginary(number: complex) -> tuple[float, float]:
    return number.real, number.imag


class Encoder:
    """Encodes the values of one message, which share one table."""

    def __init__(self, handles: Handles, known: list[Any] | None = None):
        """`known`: containers that the receiver has already, by their numbers."""
        self._handles = handles
        self.containers = list(known or ())
        self._numbers = {id(container): number for number, container in enumerate(self.containers)}
        self._done = len(self.containers)
        self._nodes: list[list] = []

    def value(self, thing: Any, depth: int = 0) -> Any:
        """Return a value's word; its containers go to the table. Raises TooLarge."""
        kind: Any = type(thing)
        if kind in _AS_THEY_ARE:
            return thing
        if kind is int:
            return thing if -_INT64 <= thing < _INT64 else ["int", f"{thing:x}"]
        if kind is type and thing in _TYPE_NAMES:
            return ["type", _TYPE_NAMES[thing]]
        # By the classes that it is derived from: what it calls its __class__ may be a lie.
        for base in kind.__mro__:
            if base in _EXACT_CONTAINERS:
                return ["#", self._number(thing)]
            if base in _EXACTLY:
                return self.value(_EXACTLY[base](thing), depth)
            if base in _FORMS:
                if depth > _DEEPEST:
                    raise TooLarge(f"tuples nested deeper than {_DEEPEST}")
                form = _FORMS[base]
                return [form.name, *(self.value(each, depth + 1) for each in form.take_apart(thing))]
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
        if depth > _DEEPEST + 2:
            raise Malformed("values nested too deep")
        try:
            return self._tagged(word, depth)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise Malformed(f"{str(word)[:80]} is no value: {error}") from None

    def _tagged(self, word: list, depth: int) -> Any:
        match word:
            case ["#", int(number)] if 0 <= number < len(self.containers):
                return self.containers[number]
            case ["int", str(text)]:
                return int(text, 16)
            case ["type", str(name)] if name in _TYPES:
                return _TYPES[name]
            case ["mine" | "yours", *_]:
                return self._handles.decode(word)
            case [str(name), *rest] if name in _FORM_NAMES:
                form, parts = _FORM_NAMES[name], [self.value(each, depth + 1) for each in rest]
                if form.parts is None or form.parts == tuple(map(type, parts)):
                    return form.put_together(*parts)
        raise Malformed(f"{str(word)[:80]} is no value")

    def fill(self, number: Any, node: Any) -> None:
        """Make a container hold what a node says, and nothing else. Raises Malformed."""
        if type(number) is not int or not 0 <= number < len(self.containers):
            raise Malformed(f"no container has the number {str(number)[:80]}")
        container: Any = self.containers[number]
        if type(node) is not list or len(node) < 2 or not issubclass(type(container), _named(node[0])):
            raise Malformed(f"container {number} is no {str(node)[:80]}")
        try:
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
            case [str(name), list()] if name in _CONTAINER_NAMES:
                return _CONTAINER_NAMES[name]()
        raise Malformed(f"{str(node)[:80]} is no container")


def _named(name: Any) -> type:
    kind = _CONTAINER_NAMES.get(name) if type(name) is str else None
    if kind is None:
        raise Malformed(f"{str(name)[:80]} is no kind of container")
    return kind
