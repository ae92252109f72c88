"""Assert-style test programs: HumanEval's `check(candidate)`, MBPP's bare asserts, `test_…` functions.

The test runs here, in the judge. Of the program it gets proxies of the names that it uses and does not define itself;
more would let the program put its own `set` or `sorted` in the place of the test's.
"""

import ast
import builtins
import importlib
import inspect
import symtable
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quartet_reward.code import usual_imports
from quartet_reward.code.report import Finding, Verdict

if TYPE_CHECKING:
    from quartet_reward.code.judge_side import Program

_FILE = "<test>"


def judge(start: Callable[[], "Program"], source: str, entry_point: str) -> None:
    """Run a test program. Returns if every test passed.

    Raises:
        Verdict: otherwise.
    """
    try:
        tree = ast.parse(source)
        code = compile(tree, _FILE, "exec", dont_inherit=True)
        names = _Names(source, tree, entry_point)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Verdict(Finding.BAD_TEST, f"the test program does not compile: {error}") from None
    namespace: dict[str, Any] = {"__name__": "__test__"}
    namespace |= {name: usual_imports.NAMES[name] for name in names.usual}
    namespace |= {name: _module(name) for name in names.modules}
    program = start()
    found = {name: program.find(name) for name in program.defined(sorted(names.unknown | names.hidden))}
    if names.hidden and len(found) > 1:
        raise Verdict(Finding.WRONG, f"the program defines {' and '.join(found)}; the test calls the builtins")
    namespace |= found
    lacking = sorted(names.unknown - set(found))
    under_test = program.find(entry_point) if entry_point else _only(found, lacking)
    try:
        exec(code, namespace)
        _run_functions(namespace, names, under_test)
    except Verdict:
        raise
    except SystemExit as error:  # as unittest.main() ends
        if error.code not in (None, 0):
            raise Verdict(Finding.WRONG, f"the test program ended with status {error.code}") from None
    except BaseException as error:
        raise _verdict(error, program, lacking) from None
    if not program.was_called():
        raise Verdict(Finding.BAD_TEST, "the test program ended without calling the program")


def _run_functions(namespace: dict[str, Any], names: "_Names", under_test: Any) -> None:
    """Call what the test program defines and leaves to its harness to call."""
    check = namespace.get("check")
    if "check" in names.functions and "check" not in names.called and callable(check):
        count = len([each for each in inspect.signature(check).parameters.values() if each.default is each.empty])
        if count > 1 or (count == 1 and under_test is None):
            raise Verdict(Finding.BAD_TEST, "check takes one function, which reference.entry_point has to name")
        check(*[under_test] * count)
    for name in names.functions:
        if name.startswith("test_") and name not in names.called and not names.functions[name]:
            namespace[name]()


def _only(found: dict[str, Any], lacking: list[str]) -> Any:
    """The function under test where the reference does not name it."""
    if lacking and not found:
        raise Verdict(Finding.RAISED, f"the program does not define {' or '.join(lacking)}, which the test uses")
    return next(iter(found.values())) if len(found) == 1 else None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Verdict(Finding.BAD_TEST, f"the test program's module {name} cannot be imported: {error}") from None


def _verdict(error: BaseException, program: "Program", lacking: list[str]) -> Verdict:
    shown = f"{type(error).__name__}: {error}"[:300]
    line = _line(error)
    if getattr(error, "from_other_side", False):
        if isinstance(error, MemoryError):
            return Verdict(Finding.OUT_OF_MEMORY, f"the program ran out of memory {line}")
        return Verdict(Finding.RAISED, f"the program raised {shown} {line}")
    if isinstance(error, NameError) and error.name in lacking:
        return Verdict(Finding.RAISED, f"the program does not define '{error.name}', which the test uses {line}")
    if isinstance(error, AssertionError) and program.was_called():
        return Verdict(Finding.WRONG, f"the assertion {line} fails")
    if program.was_called():
        return Verdict(Finding.WRONG, f"the test ended with {shown} {line}")
    return Verdict(Finding.BAD_TEST, f"before it called the program, the test ended with {shown} {line}")


def _line(error: BaseException) -> str:
    trace, line = error.__traceback__, 0
    while trace:
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"in line {line} of the test" if line else "in the test"


class _Names:
    """Which names a test program uses without defining them, and which functions it defines and calls."""

    def __init__(self, source: str, tree: ast.Module, entry_point: str):
        self.functions = {
            node.name: len(node.args.args) - len(node.args.defaults)
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
        }
        """Functions at the top level, and how many arguments each requires."""
        uses = _Uses()
        uses.visit(tree)
        self.called = uses.called
        outside = _outside(symtable.symtable(source, _FILE, "exec"))
        self.modules = {name for name in outside - uses.plainly - {entry_point} if name in sys.stdlib_module_names}
        """Modules of the standard library that it uses without importing them."""
        unknown = {name for name in outside - self.modules if name == entry_point or not hasattr(builtins, name)}
        usual = {name for name in unknown - {entry_point} if name in usual_imports.NAMES}
        # `gcd` is a function of the library, unless nothing else is left that might be under test.
        self.usual = usual if entry_point or unknown - usual else set()
        """Functions of the standard library that it uses without importing them. Neither these nor the modules are
        ever the program's: it may have changed them."""
        self.unknown = unknown - self.usual - {"__name__", "__file__"}
        """What remains: names that only the program can define."""
        named = self.unknown or entry_point or "check" in self.functions
        self.hidden = set() if named else {name for name in self.called & outside if hasattr(builtins, name)}
        """Builtins that it calls, if nothing else names a function under test: a program may define one of them."""


def _outside(table: symtable.SymbolTable) -> set[str]:
    """Names that are read from the module's scope, in it or below, and that the module itself does not bind."""
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used, tables = set(), [table]
    while tables:
        scope = tables.pop()
        tables += scope.get_children()
        in_module = scope is table
        used |= {
            each.get_name() for each in scope.get_symbols() if each.is_referenced() and (in_module or each.is_global())
        }
        bound |= {each.get_name() for each in scope.get_symbols() if each.is_declared_global() and each.is_assigned()}
    return used - bound


class _Uses(ast.NodeVisitor):
    def __init__(self) -> None:
        self.plainly: set[str] = set()
        """Names that are used otherwise than as `name.attribute`."""
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
