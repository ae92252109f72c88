"""Compares a function's result with the expected value, which comes from JSON, and what a program prints with a text.

Outputs are compared piece by piece: either may have megabytes.
"""

import math
import re
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass
from decimal import Decimal
from itertools import zip_longest
from types import CoroutineType
from typing import Any, Literal

from quartet_reward.code.plain import Remote, result_of

Compare = Literal["lines", "tokens", "lenient"]
_NUMBERS = (int, float)
_VIEWS = KeysView | ValuesView | ItemsView
_LENIENT_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """When two outputs or results are the same."""

    by_tokens: bool = False
    """Of printed output only the tokens count."""
    tolerance: float = 0.0
    """Largest difference of a float, absolute or relative to the expected one."""
    ignore_case: bool = False
    """Of texts, case and white space at the end of lines do not count."""

    @staticmethod
    def of(compare: Compare, tolerance: float) -> "OutputComparison":
        """Return the comparison that the parameters of these names choose."""
        if compare == "lenient":
            return OutputComparison(tolerance=tolerance or _LENIENT_TOLERANCE, ignore_case=True)
        return OutputComparison(by_tokens=compare == "tokens", tolerance=tolerance)


def as_data(value: Any, made: dict[int, Any] | None = None) -> Any:
    """Return a value as data at any depth: iterators, views, ranges, deques, arrays as lists, coroutines as results."""
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]
    result: Any
    if isinstance(value, CoroutineType):
        return as_data(result_of(value), made)
    if isinstance(value, tuple):
        return tuple(as_data(each, made) for each in value)
    if isinstance(value, dict):
        made[id(value)] = result = {}
        result.update((key, as_data(each, made)) for key, each in value.items())
    elif isinstance(value, list | deque | range | _VIEWS) or hasattr(type(value), "__next__"):
        made[id(value)] = result = []
        result.extend(as_data(each, made) for each in value)
    else:
        return as_data(value.tolist(), made) if hasattr(type(value), "tolist") else value
    made[id(result)] = value  # kept, or another object might get its id
    return result


def is_data(value: Any) -> bool:
    """Return whether a decoded value has no proxy in it, at any depth. Raises RecursionError: nested too deep."""
    if isinstance(value, dict):
        return all(is_data(key) and is_data(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque | _VIEWS):
        return all(map(is_data, value))
    return not isinstance(value, Remote | CoroutineType)


def plain(value: Any) -> Any:
    """Return a result as JSON represents it: tuples as lists, keys as text."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {_key(key): plain(each) for key, each in value.items()}
    return value


def same(found: Any, expected: Any, comparison: OutputComparison) -> bool:
    """Return whether two values returned by `plain` are equal.

    Where a float is expected, the number may differ as in `close`. Integers and texts are compared exactly.
    """
    if type(found) in _NUMBERS and type(expected) in _NUMBERS:
        near = comparison.tolerance > 0 and type(expected) is float
        return found == expected or (near and close(found, expected, comparison.tolerance))
    if type(found) is list and type(expected) is list:
        return len(found) == len(expected) and all(
            same(one, other, comparison) for one, other in zip(found, expected, strict=True)
        )
    if type(found) is dict and type(expected) is dict:
        return found.keys() == expected.keys() and all(same(found[key], expected[key], comparison) for key in found)
    if comparison.ignore_case and type(found) is str and type(expected) is str:
        return _folded(found) == _folded(expected)
    return bool(found == expected)


def close(found: float, expected: float, tolerance: float) -> bool:
    """Return whether two numbers differ by at most `tolerance`, absolutely or relative to the expected one."""
    try:
        return math.isclose(found, expected, rel_tol=0.0, abs_tol=tolerance * max(1.0, abs(float(expected))))
    except OverflowError:  # an integer too large for a float
        return False


def _folded(text: str) -> list[str]:
    return [line.rstrip() for line in text.casefold().rstrip().split("\n")]


def _key(key: Any) -> Any:
    if isinstance(key, bool):
        return "true" if key else "false"
    if key is None:
        return "null"
    return str(key) if isinstance(key, int | float) else key


_TOKEN = re.compile(r"\S+")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(
    r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+|inf|infinity|nan)", re.IGNORECASE
)


def same_output(found: str, expected: str, comparison: OutputComparison) -> bool:
    """Return whether two outputs are the same.

    Trailing white space of lines and empty lines at the end are ignored. With a tolerance, lines are compared token by
    token: see `_same_token`.
    """
    if found == expected:
        return True
    pieces, same = (_tokens, _same_token) if comparison.by_tokens else (_lines, _same_line)
    return _all_same(pieces(found), pieces(expected), same, comparison)


def _all_same(
    found: Iterator[str],
    expected: Iterator[str],
    same: Callable[[str, str, OutputComparison], bool],
    comparison: OutputComparison,
) -> bool:
    return all(
        one is not None and other is not None and same(one, other, comparison)
        for one, other in zip_longest(found, expected)
    )


def _lines(text: str) -> Iterator[str]:
    """Return the lines without white space at their ends, up to the last one that is not empty."""
    empty, start = 0, 0
    while start <= len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        line = text[start:end].rstrip()
        start = end + 1
        if not line:
            empty += 1
            continue
        yield from ("" for _ in range(empty))
        empty = 0
        yield line


def _tokens(text: str) -> Iterator[str]:
    return (match.group() for match in _TOKEN.finditer(text))


def _same_line(found: str, expected: str, comparison: OutputComparison) -> bool:
    if found == expected or not (comparison.tolerance or comparison.ignore_case):
        return found == expected
    return _all_same(_tokens(found), _tokens(expected), _same_token, comparison)


def _same_token(found: str, expected: str, comparison: OutputComparison) -> bool:
    """Return whether two tokens are the same text, or numbers that are close.

    The tolerance is for floats: tokens with a point or an exponent, inf and nan. Where an integer is expected, the
    number must be that integer, and two strings of digits must be the same text.
    """
    if found == expected or (comparison.ignore_case and found.casefold() == expected.casefold()):
        return True
    if not comparison.tolerance:
        return False
    if _FLOAT.fullmatch(expected):
        a_number = _FLOAT.fullmatch(found) or _INTEGER.fullmatch(found)
        return bool(a_number) and close(float(found), float(expected), comparison.tolerance)
    return bool(_INTEGER.fullmatch(expected) and _FLOAT.fullmatch(found)) and Decimal(found) == Decimal(expected)
