"""What cannot cross as plain data stays where it is; the other side gets a number for it, and a proxy."""

from collections.abc import Callable
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
