"""Marks a test program's functions and assertions, so that none of them is silently not run."""

import ast
import builtins
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

_ENTER, _CHECK, _KEEP = "__quartet_enter__", "__quartet_check__", "__quartet_keep__"
_ASSERTS = re.compile(r"_*assert|raises$|warns$")
_BLOCKS = ("body", "orelse", "finalbody")
_FAILS = frozenset({"fail", "exit", "quit", "_exit", "abort"})
_KNOWN_BEFORE = frozenset({*vars(builtins), "__name__", "__file__", "sys", "os", "platform", "environ", "argv"})
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(slots=True)
class MarkedFunction:
    """A function of a test program that a runner of tests collects, or that asserts."""

    name: str
    is_test: bool
    """Whether runners collect functions of its name: `test…`, and HumanEval's `check`."""
    owner: str = ""
    """The class of a method."""
    asserts: bool = False
    """Whether its own statements assert, other than by `raise`."""
    called: bool = False
    """Whether the test program calls it by name, or passes it to a function that is no builtin: the program under test
    may decide whether it runs."""
    mentioned: bool = False
    decorated: bool = False
    entered: bool = False
    value: Any = None
    """The function, with its decorators, once it has been defined."""


@dataclass(slots=True)
class Marks:
    """What has been defined and run of a test program."""

    functions: list[MarkedFunction] = field(default_factory=list)
    classes: list[tuple[str, Any]] = field(default_factory=list)
    """Names and values."""
    mentioned: set[str] = field(default_factory=set)
    """The names that the test program uses."""
    assertions: list[bool] = field(default_factory=list)
    """Of each assertion, whether what the program under test does may decide if it is reached."""
    reached: bool = False
    """Whether an assertion has been reached."""

    @property
    def namespace(self) -> dict[str, Callable[..., Any]]:
        """The functions that a marked program calls, by name."""
        return {_ENTER: self._enter, _CHECK: self._check, _KEEP: self._keep}

    def _enter(self, number: int) -> None:
        self.functions[number].entered = True

    def _check(self) -> None:
        self.reached = True

    def _keep(self, number: int | str) -> Callable[[Any], Any]:
        def keep(value: Any) -> Any:
            if isinstance(number, str):
                self.classes.append((number, value))
            else:
                self.functions[number].value = value
            return value

        return keep


def mark(source: str, file: str) -> tuple[Any, Marks]:
    """Return a test program's code, which reports to the marks, and the marks.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it does not compile.
    """
    tree = ast.parse(source, file)
    marker = _Marker(tree)
    tree.body = marker.block(tree.body, None, "", False)
    return compile(tree, file, "exec", dont_inherit=True), marker.marks


class _Marker:
    def __init__(self, tree: ast.Module):
        self.marks = Marks()
        self._called: set[str] = set()
        self._mentioned = self.marks.mentioned
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                self._mentioned.add(_name(node))
            elif isinstance(node, ast.Call):
                self._called.add(_name(node.func))
                if not (isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id)):
                    values = [*node.args, *(each.value for each in node.keywords)]
                    self._called |= {_name(each) for each in values if isinstance(each, ast.Name)}

    def block(
        self, statements: list[ast.stmt], function: MarkedFunction | None, owner: str, depends: bool
    ) -> list[ast.stmt]:
        """Return the statements with marks.

        Args:
            function: the function whose statements they are.
            owner: the class whose statements they are.
            depends: what the program under test does may decide whether they run.
        """
        marked: list[ast.stmt] = []
        for statement in statements:
            if isinstance(statement, _Definition):
                self._define(statement, owner)
            else:
                if _asserts(statement):
                    marked.append(ast.copy_location(ast.Expr(_call(_CHECK, at=statement)), statement))
                    self.marks.assertions.append(depends)
                    if function and not isinstance(statement, ast.Raise):
                        function.asserts = True
                blocks = [name for name in _BLOCKS if isinstance(getattr(statement, name, None), list)]
                within = depends or (bool(blocks) and _depends(statement))
                for name in blocks:
                    setattr(statement, name, self.block(getattr(statement, name), function, owner, within))
                for handler in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
                    handler.body = self.block(handler.body, function, owner, True)
            marked.append(statement)
        return marked

    def _define(self, node: _Definition, owner: str) -> None:
        if isinstance(node, ast.ClassDef):
            node.body = self.block(node.body, None, node.name, False)
            node.decorator_list.insert(0, _call(_KEEP, node.name, at=node))
            return
        function = MarkedFunction(
            node.name,
            node.name.startswith("test") or (node.name == "check" and not owner),
            owner,
            called=node.name in self._called,
            mentioned=node.name in self._mentioned,
            decorated=bool(node.decorator_list),
        )
        number = len(self.marks.functions)
        self.marks.functions.append(function)
        has_text = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        enter = ast.copy_location(ast.Expr(_call(_ENTER, number, at=node.body[0])), node.body[0])
        body = self.block(node.body[has_text:], function, "", function.called)
        node.body = [*node.body[:has_text], enter, *body]
        node.decorator_list.insert(0, _call(_KEEP, number, at=node))


def _asserts(statement: ast.stmt) -> bool:
    """Return whether a statement asserts, or decides whether the test fails, as in `if …: raise AssertionError`."""
    if isinstance(statement, ast.Assert | ast.Raise):
        return True
    nodes = [node for part in _own_parts(statement) for node in ast.walk(part)]
    names = {_name(node.func) for node in nodes if isinstance(node, ast.Call)}
    if any(_ASSERTS.match(name) or name in _FAILS for name in names):
        return True
    blocks = [getattr(statement, name, None) for name in _BLOCKS]
    blocks += [each.body for each in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]]
    return any(_fails(each) for block in blocks if isinstance(block, list) for each in block)


def _fails(statement: ast.stmt) -> bool:
    """Return whether a statement always fails: `raise`, `assert False`, `self.fail()`."""
    match statement:
        case ast.Raise() | ast.Assert(test=ast.Constant(value=0 | False | None | "")):
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return _name(function) in _FAILS
    return False


def _own_parts(statement: ast.stmt) -> Iterable[ast.AST]:
    """Return the expressions of a statement that are not within its blocks."""
    for name, value in ast.iter_fields(statement):
        if name not in (*_BLOCKS, "handlers", "cases"):
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST))


def _depends(statement: ast.stmt) -> bool:
    """Return whether what the program under test does may decide if a statement's blocks run."""
    if isinstance(statement, ast.With | ast.AsyncWith | ast.Try | ast.TryStar):
        return False
    names = {node.id for part in _own_parts(statement) for node in ast.walk(part) if isinstance(node, ast.Name)}
    return not names <= _KNOWN_BEFORE


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _call(name: str, *arguments: Any, at: ast.AST) -> ast.Call:
    made = ast.Call(ast.Name(name, ast.Load()), [ast.Constant(each) for each in arguments], [])
    for node in ast.walk(made):
        ast.copy_location(node, at)
    return made
