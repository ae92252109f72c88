"""Compares a function's result with the expected value, which comes from JSON."""

import math
from typing import Any

_NUMBERS = (int, float)


def plain(value: Any) -> Any:
    """Return a result as JSON represents it: tuples as lists, keys as text."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {_key(key): plain(each) for key, each in value.items()}
    return value


def same(found: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two values returned by `plain` are equal; numbers may differ as in `close`."""
    if type(found) in _NUMBERS and type(expected) in _NUMBERS:
        return found == expected or (tolerance > 0 and close(found, expected, tolerance))
    if type(found) is list and type(expected) is list:
        return len(found) == len(expected) and all(
            same(one, other, tolerance) for one, other in zip(found, expected, strict=True)
        )
    if type(found) is dict and type(expected) is dict:
        return found.keys() == expected.keys() and all(same(found[key], expected[key], tolerance) for key in found)
    return bool(found == expected)


def close(found: float, expected: float, tolerance: float) -> bool:
    """Return whether two numbers differ by at most `tolerance`, absolutely or relative to the expected one."""
    try:
        return math.isclose(found, expected, rel_tol=0.0, abs_tol=tolerance * max(1.0, abs(float(expected))))
    except OverflowError:  # an integer too large for a float
        return False


def _key(key: Any) -> Any:
    if isinstance(key, bool):
        return "true" if key else "false"
    if key is None:
        return "null"
    return str(key) if isinstance(key, int | float) else key
