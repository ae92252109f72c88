"""References of prompts, read from the shapes that public data sets have them in; docs/data.md lists the shapes."""

import ast
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

_FUNCTION_KINDS = ("functional", "function_call")
_PROGRAM_KINDS = ("stdin", "stdin_stdout")


def answer_text(value: Any) -> Any:
    """Return an answer as text: that of a number, or of the only item of a list. Other values are returned unchanged.

    Raises:
        ValueError: a list of several answers, or a number that is not finite.
    """
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ValueError(f"a list of {len(value)} answers; one is allowed: join them by a function, or choose one")
        value = value[0]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a finite number is allowed")
        return format(Decimal(repr(value)), "f")  # not 1e-07, which no reader of answers has to know
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def read_text(text: str) -> Any:
    """Return the value of JSON, or of Python's notation, which some data sets have instead. Raises ValueError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError("it is text that is not JSON") from None


def is_program(value: Any) -> bool:
    """Return whether a value is a list of statements, such as MBPP's `test_list`, or such a list as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = read_text(value)
        except ValueError:
            return False
    return isinstance(value, list) and bool(value) and all(isinstance(line, str) for line in value)


def program_text(value: Any) -> Any:
    """Return a test program as text, from text or a list of statements. Other values are returned unchanged."""
    if is_program(value):
        return "\n".join(read_text(value) if isinstance(value, str) else value)
    return value


def read_cases(value: Any, entry_point: str = "") -> dict[str, Any]:
    """Return test cases as `inputs`, `outputs` (texts, as in the contract) and `fn_name`.

    Args:
        value: these three, or `input` and `output`; or a list of cases, each with `input`, `output` and perhaps `type`,
            `fn_name`; or one of both as JSON.
        entry_point: the function under test, if it is known otherwise.

    A program's input is text, or a list of lines. A function's inputs are all JSON text, and so are then its outputs;
    or they are values, and so are then its outputs: the text "12" is a string, not the number 12.

    Raises:
        ValueError: they have another shape.
    """
    if isinstance(value, str):
        value = read_text(value)
    if isinstance(value, list) and value and all(isinstance(case, Mapping) for case in value):
        value = _table(value, entry_point)
    if not isinstance(value, Mapping):
        raise ValueError('allowed: "inputs" and "outputs", or a list of cases with "input" and "output"; also as JSON')
    rest = dict(value)
    inputs, outputs = (rest.pop(many, rest.pop(many[:-1], [])) for many in ("inputs", "outputs"))
    name = rest.pop("fn_name", None) or ""
    if isinstance(inputs, list) and isinstance(outputs, list):
        if entry_point or name:
            inputs, outputs = _values(inputs, outputs)
        else:
            inputs, outputs = ([_lines(each) for each in texts] for texts in (inputs, outputs))
    return {**rest, "inputs": inputs, "outputs": outputs, "fn_name": name}


def joined_cases(values: Iterable[Any], entry_point: str = "") -> dict[str, Any]:
    """Return the cases of several values, each as `read_cases` reads it. Raises ValueError."""
    tables = [read_cases(value, entry_point) for value in values]
    if len(names := {table["fn_name"] for table in tables}) > 1:
        raise ValueError(f"cases of several functions: {', '.join(sorted(names))}")
    joined = {key: [each for table in tables for each in table[key]] for key in ("inputs", "outputs")}
    return {**joined, "fn_name": "".join(names)}


def _table(cases: Sequence[Mapping[str, Any]], entry_point: str) -> dict[str, Any]:
    """Return a list of cases as one table."""
    for n, case in enumerate(cases):
        if lacking := {"input", "output"} - case.keys():
            raise ValueError(f'case {n} has no "{min(lacking)}"; it has {", ".join(map(str, case)) or "nothing"}')
    kinds = {case.get("testtype") or case.get("type") or "" for case in cases}
    names = {name for case in cases if (name := case.get("fn_name") or _function_of(case.get("metadata")))}
    if len(kinds) > 1 or len(names) > 1:
        raise ValueError(f"cases of several kinds: {', '.join(sorted({*map(str, kinds), *map(str, names)} - {''}))}")
    kind, name = kinds.pop(), names.pop() if names else ""
    if kind in _FUNCTION_KINDS and not (name or entry_point):
        raise ValueError("cases of a function, whose name is missing: give entry_point")
    if kind in _PROGRAM_KINDS and entry_point:
        raise ValueError(f"cases of standard input, and entry_point is {entry_point!r}: leave it out")
    return {
        "inputs": [case["input"] for case in cases],
        "outputs": [case["output"] for case in cases],
        "fn_name": "" if kind in _PROGRAM_KINDS else name,
    }


def _function_of(metadata: Any) -> Any:
    if isinstance(metadata, str) and metadata:
        metadata = read_text(metadata)
    return metadata.get("func_name") if isinstance(metadata, Mapping) else None


def _values(inputs: list[Any], outputs: list[Any]) -> tuple[list[str], list[str]]:
    """Return a function's cases as JSON text."""
    texts = sum(isinstance(each, str) for each in inputs)
    if 0 < texts < len(inputs):
        raise ValueError("some inputs are text, JSON of arguments, and others are values; all are one or the other")
    if texts:
        return inputs, [each if isinstance(each, str) else _json(each) for each in outputs]
    return [_json(each) for each in inputs], [_json(each) for each in outputs]


def _lines(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        return _json(value)
    if not all(isinstance(line, str) for line in value):
        raise ValueError(f"a program reads and prints text, or lines of text; {str(value)[:60]!r} is neither")
    return "\n".join(value)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"allowed are JSON values: {error}") from None
