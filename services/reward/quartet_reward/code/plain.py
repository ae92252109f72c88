"""Encodes plain data as JSON; decoded values have exact builtin types, not the sender's subclasses.

A message has a `value` and a table `nodes` of mutable containers. Containers refer to each other by number, so that
sharing and cycles survive, and an answer can return the changes to the containers of its question.

| encoded | is |
|---|---|
| null, true, 1, 2.5, "text" | itself; NaN and the infinities too |
| ["#", i] | container i of the table |
| ["int", hex], ["type", name] | |
| [name, part, …] | a value of parts: see `_FORMS` |
| ["mine" \\| "yours", …] | see `Handles` |
"""

import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal


class Malformed(Exception):
    """The other side sent an invalid message."""


class TooLarge(Exception):
    """The data to send exceeds a limit."""


class NotPlain(Exception):
    """The data to send contains an object, which is not allowed."""


_MOST_HANDLES = 100_000

Kind = Literal["callable", "iterator", "object"]


class Remote:
    """A proxy for an object of the other side; equal only to itself."""

    __slots__ = ("_ask", "_number")

    def __init__(self, number: int, ask: Callable[..., Any]):
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_ask", ask)


class Handles:
    """The objects that this side has lent to the other, and the proxies of those that it has borrowed."""

    def __init__(self, ask: Callable[..., Any], proxies: dict[Kind, type[Remote]], lends_objects: bool = True):
        """Start without objects.

        Args:
            ask: called by proxies as ask(number, operation, *arguments).
            proxies: the proxy class for each kind of object.
            lends_objects: also lend objects that are neither functions nor iterators.
        """
        self._ask = ask
        self._proxies = proxies
        self._lends_objects = lends_objects
        self._lent: list[tuple[Any, Kind]] = []
        self._numbers: dict[int, int] = {}
        self._borrowed: dict[int, Remote] = {}

    def encode(self, value: Any) -> list:
        """Return the encoded reference to an object that is not plain data.

        Raises:
            NotPlain: such objects are not lent.
            TooLarge: too many objects are lent.
        """
        if isinstance(value, Remote):
            return ["mine", object.__getattribute__(value, "_number")]
        number = self._numbers.get(id(value))
        if number is None:
            kind = _kind(value)
            if kind == "object" and not self._lends_objects:
                raise NotPlain(f"an object of {type(value).__name__}; strict mode passes data, functions and iterators")
            if len(self._lent) >= _MOST_HANDLES:
                raise TooLarge(f"more than {_MOST_HANDLES} objects that are not plain data")
            number = self._numbers[id(value)] = len(self._lent)
            self._lent.append((value, kind))
        return ["yours", number, self._lent[number][1]]

    def decode(self, encoded: list) -> Any:
        """Return the object of an encoded reference. Raises Malformed."""
        match encoded:
            case ["mine", int(number)] if 0 <= number < len(self._lent):
                return self._lent[number][0]
            case ["yours", int(number), str(kind)] if kind in self._proxies and 0 <= number < _MOST_HANDLES:
                if number not in self._borrowed:
                    self._borrowed[number] = self._proxies[kind](number, self._ask)
                return self._borrowed[number]
        raise Malformed(f"no object is called {str(encoded)[:80]}")

    def lent(self, number: Any) -> tuple[Any, Kind]:
        """Return the object of this side with this number, and its kind. Raises Malformed."""
        if type(number) is not int or not 0 <= number < len(self._lent):
            raise Malformed(f"no object has the number {str(number)[:80]}")
        return self._lent[number]


def _kind(value: Any) -> Kind:
    if callable(value):
        return "callable"
    return "iterator" if hasattr(type(value), "__next__") else "object"


def ask(proxy: Remote, operation: str, *arguments: Any, **named: Any) -> Any:
    """Perform an operation on a proxy's object; return the result."""
    return object.__getattribute__(proxy, "_ask")(
        object.__getattribute__(proxy, "_number"), operation, *arguments, **named
    )


class RemoteFunction(Remote):
    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return ask(self, "call", *arguments, **named)


class RemoteIterator(Remote):
    """An iterator or generator; each `next` is a remote call."""

    __slots__ = ()

    def __iter__(self) -> "RemoteIterator":
        return self

    def __next__(self) -> Any:
        return ask(self, "next")


class OpaqueObject(Remote):
    """Another object of the other side, which can only be passed on or returned."""

    __slots__ = ()


OPAQUE_PROXIES: dict[Kind, type[Remote]] = {
    "callable": RemoteFunction,
    "iterator": RemoteIterator,
    "object": OpaqueObject,
}


class ProgramObject(Remote):
    """An object of the program that is not plain data; equal only to itself."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        # The interpreter looks up special methods; those that are supported are below.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask(self, "set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        ask(self, "set_item", key, value)

    def __contains__(self, key: Any) -> bool:
        return _of_type(bool, ask(self, "contains", key))

    def __len__(self) -> int:
        return _of_type(int, ask(self, "len"))

    def __bool__(self) -> bool:
        return _of_type(bool, ask(self, "bool"))

    def __str__(self) -> str:
        return _of_type(str, ask(self, "str"))

    def __repr__(self) -> str:
        return _of_type(str, ask(self, "repr"))

    def __iter__(self) -> Iterator[Any]:
        iterator = ask(self, "iter")
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
# Subclasses are sent as their base type, converted by that type's own method, because an override may lie.
_EXACTLY: dict[type, Callable[[Any], Any]] = {int: int.__index__, float: float.__float__, str: str.__str__}
_TYPES = {
    each.__name__: each
    for each in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object, range)
} | {"NoneType": type(None)}
_TYPE_NAMES = {each: name for name, each in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class _Form:
    """The encoding of an immutable type: its name and parts, which are values in turn."""

    name: str
    take_apart: Callable[[Any], Iterable[Any]]
    put_together: Callable[..., Any]
    parts: tuple[type, ...] | None = None
    """The exact types of the parts; None: any number of any."""


_FORMS: dict[type, _Form] = {
    tuple: _Form("tuple", tuple.__iter__, lambda *parts: parts),
    frozenset: _Form("frozenset", frozenset.__iter__, lambda *parts: frozenset(parts)),
    complex: _Form("complex", lambda value: _real_and_imaginary(complex.__complex__(value)), complex, (float, float)),
    bytes: _Form("bytes", lambda value: [bytes.decode(value, "latin-1")], lambda text: text.encode("latin-1"), (str,)),
    range: _Form("range", lambda value: (value.start, value.stop, value.step), range, (int, int, int)),
    Decimal: _Form("Decimal", lambda value: [Decimal.__str__(value)], Decimal, (str,)),
    Fraction: _Form(
        "Fraction",
        lambda value: [Fraction.numerator.fget(value), Fraction.denominator.fget(value)],  # type: ignore[attr-defined]
        Fraction,
        (int, int),
    ),
    type({}.keys()): _Form("keys", iter, lambda *parts: dict.fromkeys(parts).keys()),
    type({}.values()): _Form("values", iter, lambda *parts: dict(enumerate(parts)).values()),
    type({}.items()): _Form("items", iter, lambda *parts: dict(parts).items()),
    types.CoroutineType: _Form("coroutine", lambda value: [result_of(value)], lambda *results: _returns(*results)),
    type(...): _Form("...", lambda value: (), lambda: ..., ()),
}
_FORM_NAMES = {form.name: form for form in _FORMS.values()}
# Subclasses before their bases.
_CONTAINERS: tuple[type, ...] = (Counter, OrderedDict, defaultdict, dict, list, set, deque, bytearray)
_CONTAINER_NAMES = {each.__name__: each for each in _CONTAINERS}
_EXACT_CONTAINERS = frozenset(_CONTAINERS)


def result_of(coroutine: Any) -> Any:
    """Run a coroutine to its end."""
    import asyncio  # few programs have coroutines, and it is slow to import

    return asyncio.run(coroutine)


async def _returns(result: Any) -> Any:
    return result


def _real_and_imaginary(number: complex) -> tuple[float, float]:
    return number.real, number.imag


class Encoder:
    """Encodes the values of one message, which share a table of containers."""

    def __init__(self, handles: Handles, known: list[Any] | None = None):
        """`known`: the receiver has these containers already, numbered in this order."""
        self._handles = handles
        self.containers = list(known or ())
        self._numbers = {id(container): number for number, container in enumerate(self.containers)}
        self._done = len(self.containers)
        self._nodes: list[list] = []

    def value(self, value: Any, depth: int = 0) -> Any:
        """Return an encoded value and add its containers to the table. Raises TooLarge."""
        kind: Any = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if kind is int:
            return value if -_INT64 <= value < _INT64 else ["int", f"{value:x}"]
        if kind is type and value in _TYPE_NAMES:
            return ["type", _TYPE_NAMES[value]]
        # By the real base classes: its __class__ may lie.
        for base in kind.__mro__:
            if base in _EXACT_CONTAINERS:
                return ["#", self._number(value)]
            if base in _EXACTLY:
                return self.value(_EXACTLY[base](value), depth)
            if base in _FORMS:
                if depth > _DEEPEST:
                    raise TooLarge(f"tuples nested deeper than {_DEEPEST}")
                form = _FORMS[base]
                return [form.name, *(self.value(each, depth + 1) for each in form.take_apart(value))]
            if base.__module__ == "numpy" and base.__name__ == "generic" and depth <= _DEEPEST:
                return self.value(value.item(), depth + 1)
        return self._handles.encode(value)

    def nodes(self) -> list[list]:
        """Return the table of the containers that the receiver lacks."""
        while self._done < len(self.containers):
            self._nodes.append(self.node(self.containers[self._done]))
            self._done += 1
        return self._nodes

    def node(self, container: Any) -> list:
        """Return an encoded container."""
        kind: Any = next(each for each in type(container).__mro__ if each in _EXACT_CONTAINERS)
        if issubclass(kind, dict):
            items = [each for pair in kind.items(container) for each in pair]
        else:
            items = list(kind.__iter__(container))
        kinds = set(map(type, items))
        if kinds <= _AS_THEY_ARE or (kinds == {int} and min(items) >= -_INT64 and max(items) < _INT64):
            encoded = items
        else:
            encoded = [self.value(each) for each in items]
        extra = []
        if kind is deque:
            extra = [self.value(container.maxlen)]
        elif kind is defaultdict:
            factory = container.default_factory
            extra = [self.value(factory if type(factory) is type and factory in _TYPE_NAMES else None)]
        return [kind.__name__, encoded, *extra]

    def _number(self, container: Any) -> int:
        number = self._numbers.get(id(container))
        if number is None:
            number = self._numbers[id(container)] = len(self.containers)
            self.containers.append(container)
        return number


class Decoder:
    def __init__(self, handles: Handles, nodes: Any, known: list[Any] | None = None):
        """`known`: the containers with the first numbers; `nodes` follow. Raises Malformed."""
        self._handles = handles
        self.containers = list(known or ())
        first = len(self.containers)
        if type(nodes) is not list:
            raise Malformed("a table of containers is a list")
        self.containers += [self._empty(node) for node in nodes]
        for number, node in enumerate(nodes, first):
            self.fill(number, node)

    def value(self, encoded: Any, depth: int = 0) -> Any:
        """Return a decoded value. Raises Malformed."""
        if type(encoded) is not list:
            if type(encoded) is dict:
                raise Malformed("an object where a value is expected")
            return encoded
        if depth > _DEEPEST + 2:
            raise Malformed("values nested too deep")
        try:
            return self._tagged(encoded, depth)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise Malformed(f"{str(encoded)[:80]} is not a value: {error}") from None

    def _tagged(self, encoded: list, depth: int) -> Any:
        match encoded:
            case ["#", int(number)] if 0 <= number < len(self.containers):
                return self.containers[number]
            case ["int", str(text)]:
                return int(text, 16)
            case ["type", str(name)] if name in _TYPES:
                return _TYPES[name]
            case ["mine" | "yours", *_]:
                return self._handles.decode(encoded)
            case [str(name), *rest] if name in _FORM_NAMES:
                form, parts = _FORM_NAMES[name], [self.value(each, depth + 1) for each in rest]
                if form.parts is None or form.parts == tuple(map(type, parts)):
                    return form.put_together(*parts)
        raise Malformed(f"{str(encoded)[:80]} is not a value")

    def fill(self, number: Any, node: Any) -> None:
        """Replace a container's content by that of a node. Raises Malformed."""
        if type(number) is not int or not 0 <= number < len(self.containers):
            raise Malformed(f"no container has the number {str(number)[:80]}")
        container: Any = self.containers[number]
        if type(node) is not list or len(node) < 2 or not issubclass(type(container), _named(node[0])):
            raise Malformed(f"container {number} is not a {str(node)[:80]}")
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
            raise Malformed(f"container {number} cannot hold its items: {error}") from None

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
        raise Malformed(f"{str(node)[:80]} is not a container")


def _named(name: Any) -> type:
    kind = _CONTAINER_NAMES.get(name) if type(name) is str else None
    if kind is None:
        raise Malformed(f"{str(name)[:80]} is not a type of container")
    return kind
