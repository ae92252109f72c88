"""The program's side of judged execution: compiles it, runs it, and performs the judge's requests on its objects.

The judge trusts only the first message, which is sent before the program's first instruction.
"""

import contextlib
import inspect
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from quartet_reward.code.names import BUILTINS
from quartet_reward.code.plain import OPAQUE_PROXIES
from quartet_reward.code.rpc import Channel, Gone, Peer
from quartet_reward.code.values import as_data

PEER_DESCRIPTOR = 3
MODULE = "solution"


def main(payload: bytes) -> None:
    """Compile the program `payload`, send the result to the judge, and serve its requests until it ends."""
    channel = Channel(PEER_DESCRIPTOR)
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    try:
        code = compile(payload.decode(), f"<{MODULE}>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        channel.send({"compile_error": f"{type(error).__name__}: {error}"[:500]})
        return
    # The usual names are builtins, so that they do not count as defined by the program.
    vars(module)["__builtins__"] = BUILTINS
    channel.send({"compile_error": None})
    with contextlib.suppress(Gone):
        Peer(channel, _Server(code, vars(module)).serve, OPAQUE_PROXIES).serve_forever()


class _Server:
    def __init__(self, code: types.CodeType, names: dict[str, Any]):
        self._code = code
        self._names = names

    def serve(self, target: Any, operation: str, arguments: tuple, named: dict[str, Any]) -> Any:
        if operation == "call":
            return target(*arguments, **named)
        if operation == "answer":
            return as_data(target(*arguments))
        if operation in _OPERATIONS:
            return _OPERATIONS[operation](target, *arguments)
        return getattr(self, operation)(*arguments)

    def begin(self, names: list[str], path: str) -> tuple[dict[str, Any], list[Any]]:
        """Run the program; return those of `names` that it defines, and a list of the object at `path`, or none."""
        exec(self._code, self._names)
        found = {name: self._names[name] for name in names if name in self._names}
        if not path:
            return found, []
        try:
            return found, [self.find(path, False)]
        except (KeyError, AttributeError):
            return found, []

    def find(self, path: str, in_solution: bool) -> Any:
        """Return the object at `f` or `Solution().f`; with `in_solution`, `f` may be a method of the class Solution."""
        solution = self._names.get("Solution")
        if in_solution and isinstance(solution, type) and hasattr(solution, path):
            return getattr(solution(), path)
        first, *rest = path.split(".")
        found = self._names[first.removesuffix("()")]
        found = found() if first.endswith("()") else found
        for part in rest:
            found = getattr(found, part.removesuffix("()"))
            found = found() if part.endswith("()") else found
        return found

    def accepts(self, function: Any, count: int) -> bool:
        try:
            inspect.signature(function).bind(*[None] * count)
        except (TypeError, ValueError):  # ValueError: it has no signature
            return False
        return True


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "contains": operator.contains,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "iter": iter,
    "next": next,
}
