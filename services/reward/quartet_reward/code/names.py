"""Resolves the names that a test program uses without defining them: standard library, or program under test."""

import ast
import bisect
import builtins
import collections
import copy
import datetime
import functools
import heapq
import itertools
import json
import math
import operator
import random
import re
import statistics
import string
import symtable
import sys
import typing
from dataclasses import dataclass
from typing import Any

_WHOLE = (typing, operator, math, itertools, functools, heapq, bisect, collections, string)
_USUAL_MODULES = (*_WHOLE, copy, datetime, json, random, re, statistics, sys)


def _usual_names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for module in _WHOLE:  # later ones win
        names.update({name: getattr(module, name) for name in module_names(module) if not hasattr(builtins, name)})
    return names | {module.__name__: module for module in _USUAL_MODULES}


def module_names(module: Any) -> list[str]:
    """Return the public names of a module: those of its `from … import *`."""
    return list(getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]))


USUAL_NAMES = _usual_names()
BUILTINS = vars(builtins) | USUAL_NAMES
"""The builtins of a program, made once: a copy would touch each of these objects, and so copy its page of memory."""


MODULES = {"np": "numpy", "pd": "pandas"}
"""Customary names of modules."""
_OF_EVERY_MODULE = {"__name__", "__file__", "__doc__"}


@dataclass(frozen=True, slots=True)
class Names:
    """The undefined names of a test program. Modules and `usual` never come from the program, which may change them."""

    modules: set[str]
    """Modules that it uses without import, of the standard library and `MODULES`."""
    usual: set[str]
    """Functions of the standard library that it uses without import."""
    unknown: set[str]
    """Names that only the program under test can define."""
    hidden: set[str]
    """Builtins that it calls, if no other name can be the function under test: a program may redefine one."""
    checks: bool
    """Whether it defines `check`, with parameters, and does not call it itself."""


def read_names(source: str, file: str, entry_point: str) -> Names:
    table = symtable.symtable(source, file, "exec")
    used, bound = _used_and_bound(table)
    functions = {each.get_name(): each for each in table.get_children() if isinstance(each, symtable.Function)}
    outside = used - bound
    modules = outside & (sys.stdlib_module_names | MODULES.keys()) - {entry_point}
    called: set[str] = set()
    named = entry_point or "check" in functions
    if modules or not named:  # only then: parsing is the slowest step
        uses = _Uses()
        uses.visit(ast.parse(source))
        modules -= uses.plainly
        called = uses.called
    unknown = {name for name in outside - modules if name == entry_point or not hasattr(builtins, name)}
    unknown -= _OF_EVERY_MODULE
    usual = {name for name in unknown - {entry_point} if name in USUAL_NAMES}
    # A name like `gcd` is the library's, unless no other name can be the function under test.
    usual = usual if entry_point or unknown - usual else set()
    unknown -= usual
    return Names(
        modules,
        usual,
        unknown,
        hidden=set() if named or unknown else {name for name in called & outside if hasattr(builtins, name)},
        checks=bool("check" in functions and "check" not in used and functions["check"].get_parameters()),
    )


def avoids(source: str, file: str, entry_point: str) -> bool:
    """Return whether a test program uses neither `entry_point` nor the parameters of its `check`."""
    table = symtable.symtable(source, file, "exec")
    checks = [
        each for each in table.get_children() if isinstance(each, symtable.Function) and each.get_name() == "check"
    ]
    return not (
        _uses(table, entry_point) or any(_uses(each, given) for each in checks for given in each.get_parameters())
    )


def _uses(table: symtable.SymbolTable, name: str) -> bool:
    return (name in table.get_identifiers() and table.lookup(name).is_referenced()) or any(
        _uses(each, name) for each in table.get_children()
    )


def starred(source: str) -> list[str]:
    """Return the modules that a test program imports by `from … import *`."""
    imports = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.ImportFrom)]
    return [each.module or "" for each in imports if each.names[0].name == "*"]


def _used_and_bound(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """Return the names that are read from the module's scope, at any depth, and those that the module binds."""
    bound = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
    used: set[str] = set()
    tables = [table]
    while tables:
        scope = tables.pop()
        tables += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (scope is table or symbol.is_global()):
                used.add(symbol.get_name())
            if symbol.is_assigned() and symbol.is_declared_global():
                bound.add(symbol.get_name())
    return used, bound


class _Uses(ast.NodeVisitor):
    def __init__(self) -> None:
        self.plainly: set[str] = set()
        """Names that are used in other ways than `name.attribute`."""
        self.called: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        self.plainly.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.value, ast.Name):
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name):
            self.called.add(node.func.id)
        self.generic_visit(node)
