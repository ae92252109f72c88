"""What cannot cross as plain data stays where it is; the other side gets a number for it, and a proxy."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from quartet_reward.code.channel import Malformed, NotPlain, TooLarge

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


class ProgramIterator(ProgramObject):
    """An iterator or generator of the program; each item is asked for when it is needed."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _ask(self, "next")


class ProgramCallable(ProgramObject):
    """A function or class of the program."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "call", *arguments, **named)


JUDGE_PROXIES: dict[Kind, type[Remote]] = {
    "callable": ProgramCallable,
    "iterator": ProgramIterator,
    "object": ProgramObject,
}


class RemoteFunction(Remote):
    """A function of the other side."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "call", *arguments, **named)


class RemoteIterator(Remote):
    """An iterator of the other side."""

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


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the program's object gives {type(value).__name__} where {kind.__name__} is required")
    return value
