"""Slightly wrong programs, and their results in plain Python."""

import ast
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_MEMORY_BYTES = 512 << 20
# Processor time, because wall time depends on the machine's load.
_WALL_PER_CPU = 20
# Some tests use `math` without importing it.
_PRELUDE = "import math\n"
_RUN = """
import resource, sys
memory, seconds = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
exec(compile(sys.stdin.read(), "program", "exec"), {})
"""
_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """A changed program."""

    index: int
    """The number of the original program."""
    source: str
    change: str


def sample_mutants(programs: Sequence[tuple[str, str]], count: int, seed: int = 0) -> list[Mutant]:
    """Return `count` different mutants, distributed over the programs as evenly as possible.

    `programs`: source and prefix of each; the prefix is not changed, because the judge has its own copy.
    """
    rng = random.Random(seed)
    queues = []
    for index, (source, prefix) in enumerate(programs):
        made = [Mutant(index, text, change) for text, change in _mutants_of(source, prefix.count("\n"))]
        rng.shuffle(made)
        queues.append(made)
    chosen: list[Mutant] = []
    while any(queues) and len(chosen) < count:
        chosen += [queue.pop() for queue in queues if queue]
    return chosen[:count]


def _mutants_of(source: str, kept_lines: int) -> list[tuple[str, str]]:
    try:
        places = len(list(ast.walk(ast.parse(source))))
    except SyntaxError:
        return []
    original = ast.unparse(ast.parse(source))
    found: dict[str, str] = {}
    for place in range(places):
        tree = ast.parse(source)
        node = list(ast.walk(tree))[place]
        change = _change(node) if getattr(node, "lineno", 0) > kept_lines else ""
        if change and (text := ast.unparse(tree)) != original:
            found.setdefault(text, f"line {node.lineno}: {change}")
    return list(found.items())


def _change(node: ast.AST) -> str:
    """Change a node in place; return a description, or nothing if it cannot be changed."""
    match node:
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in _OPERATORS:
            was, node.op = type(node.op).__name__, _OPERATORS[type(node.op)]()
            return f"{was} to {type(node.op).__name__}"
        case ast.Compare(ops=[first, *_]) if type(first) in _OPERATORS:
            node.ops[0] = _OPERATORS[type(first)]()
            return f"{type(first).__name__} to {type(node.ops[0]).__name__}"
        case ast.Constant(value=bool(value)):
            node.value = not value
            return f"{value} to {not value}"
        case ast.Constant(value=int(value)):
            node.value = value + 1
            return f"{value} to {value + 1}"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            node.value = ast.Constant(None)
            return "nothing returned"
    return ""


def plain_verdicts(programs: Sequence[tuple[str, str, str]], seconds: float) -> list[bool]:
    """Return for each (program, test, entry point) whether it succeeds in a Python process.

    A failing one is run twice, in case the machine is the cause. `seconds`: processor time of each.
    """

    def verdict(program: tuple[str, str, str]) -> bool:
        return any(_runs_to_its_end(*program, seconds) for _ in range(2))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(verdict, programs))


def _runs_to_its_end(source: str, test: str, entry_point: str, seconds: float) -> bool:
    call = f"\ncheck({entry_point})\n" if entry_point else "\n"
    limits = (_MEMORY_BYTES, math.ceil(seconds))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _RUN, *map(str, limits)],
            input=f"{_PRELUDE}{source}\n\n{test}{call}".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_WALL_PER_CPU * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
