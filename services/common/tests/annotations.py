"""Prints the annotations of a package that do not resolve: `python annotations.py PACKAGE`.

Names that a module imports under TYPE_CHECKING count as its own: what they name must be there.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Iterator
from types import ModuleType


def _modules(package: str) -> Iterator[ModuleType]:
    found = importlib.import_module(package)
    yield found
    for info in pkgutil.walk_packages(found.__path__, f"{package}."):
        if not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


def _import_for_type_checking(module: ModuleType) -> None:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), str(module.__file__), "exec"), vars(module))


def _annotated(module: ModuleType) -> Iterator[object]:
    """Yield the functions, classes and methods that a module defines."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            yield value
            yield from (method for member in vars(value).values() if (method := _function(member)) is not None)
        elif (function := _function(value)) is not None:
            yield function


def _function(member: object) -> object | None:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    member = getattr(member, "__func__", member)
    member = inspect.unwrap(member) if callable(member) else member
    return member if inspect.isfunction(member) else None


def unresolved(package: str) -> Iterator[str]:
    """Yield a line for each annotation of a package that does not resolve."""
    modules = list(_modules(package))
    for module in modules:
        _import_for_type_checking(module)
    for module in modules:
        for what in _annotated(module):
            try:
                typing.get_type_hints(what)
            except (NameError, AttributeError, TypeError, SyntaxError) as error:
                yield f"{module.__name__}.{getattr(what, '__qualname__', what)}: {error}"


if __name__ == "__main__":
    lines = list(unresolved(sys.argv[1]))
    print("\n".join(lines))
    sys.exit(bool(lines))
