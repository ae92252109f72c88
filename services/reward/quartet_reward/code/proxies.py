"""What the judge holds in place of the program's functions and objects, and what it does when they fail for good."""

from collections.abc import Iterator
from typing import Any

from quartet_reward.code.handles import Kind, Remote


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
