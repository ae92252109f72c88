"""Runs Python source as a program: in `__main__`, as `python program.py` would."""

import sys
import types

_NAME = "program.py"


def main(payload: bytes) -> None:
    """Compile and run `payload`. Raises what the program raises; SyntaxError if it is none."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__=_NAME)
    sys.modules["__main__"] = module
    sys.argv[:] = [_NAME]
    exec(compile(payload, _NAME, "exec", dont_inherit=True), module.__dict__)
