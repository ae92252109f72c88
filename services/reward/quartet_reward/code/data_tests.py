"""Which test programs only compare what the program answers with data.

Such a test has assertions, and nothing that could leave a trace in the process that runs it: no attributes, no imports,
no classes, no names but its own, the functions under test, and builtins that compute. A judge that has run it is as it
was before, and may run another.
"""

import ast
import builtins
import sys

from quartet_reward.code.names import USUAL_NAMES

_TYPES = frozenset({"bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"})
_CALLED = _TYPES | {
    *("abs", "all", "any", "bin", "chr", "divmod", "enumerate", "hex", "isinstance", "len", "max", "min", "oct"),
    *("ord", "range", "repr", "reversed", "round", "sorted", "sum", "zip"),
}
# What leaves nothing behind. Of names, calls and functions more is asked.
_HARMLESS = (
    *(ast.Module, ast.Assert, ast.Expr, ast.Pass, ast.Assign, ast.For, ast.If),
    *(ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.IfExp, ast.Subscript, ast.Slice, ast.Starred, ast.keyword, ast.JoinedStr, ast.FormattedValue),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
    *(ast.unaryop, ast.operator, ast.boolop, ast.cmpop, ast.expr_context),
)


def only_data(source: str, entry_point: str, strict: bool) -> bool:
    """True if a test program is of this kind; False also if it does not compile, or is nested too deep to be read."""
    try:
        return _Reader(entry_point, strict).reads(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


class _Reader:
    def __init__(self, entry_point: str, strict: bool):
        self._entry_point = entry_point
        self._strict = strict
        self._bound: set[str] = set()
        self._loaded: set[str] = set()
        self._called: set[str] = set()

    def reads(self, tree: ast.Module) -> bool:
        """Tell whether nothing of a tree is more than is allowed."""
        todo: list[ast.AST] = [tree]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.FunctionDef):
                allowed = node in tree.body and self._function(node)
                todo += node.body
            elif isinstance(node, ast.Call):
                allowed = isinstance(node.func, ast.Name)
                todo += [*node.args, *node.keywords]
                if isinstance(node.func, ast.Name):
                    self._called.add(node.func.id)
            elif isinstance(node, ast.Name):
                allowed = isinstance(node.ctx, ast.Load | ast.Store)
                (self._loaded if isinstance(node.ctx, ast.Load) else self._bound).add(node.id)
            else:
                allowed = isinstance(node, _HARMLESS)
                todo += ast.iter_child_nodes(node)
            if not allowed:
                return False
        return self._names_are_allowed()

    def _function(self, node: ast.FunctionDef) -> bool:
        """`check(candidate)` and `test_…()`: one that is given what it works on, not one that gives."""
        arguments = node.args
        others = [arguments.posonlyargs, arguments.kwonlyargs, arguments.defaults, arguments.vararg, arguments.kwarg]
        annotated = [each.annotation for each in arguments.args if each.annotation] or node.returns
        self._bound |= {node.name, *(each.arg for each in arguments.args)}
        return not (any(others) or annotated or node.decorator_list)

    def _names_are_allowed(self) -> bool:
        named = self._bound | self._loaded | self._called
        if any(name.startswith("__") for name in named) or self._bound & vars(builtins).keys():
            return False
        return all(self._under_test(name) for name in self._called - _CALLED - self._bound) and all(
            self._under_test(name) for name in self._loaded - _TYPES - self._bound
        )

    def _under_test(self, name: str) -> bool:
        if hasattr(builtins, name):
            return False
        if name == self._entry_point or self._strict:
            return name == self._entry_point
        return not (name in USUAL_NAMES or name in sys.stdlib_module_names)
