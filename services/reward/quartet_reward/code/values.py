"""Is a function's result the expected one? Expected values come from JSON."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

_NUMBERS = (int, float)
_MOST_TRIED = 1000


def plain(value: Any) -> Any:
    """Return a result as JSON would have it: tuples as lists, keys as text."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {_key(key): plain(each) for key, each in value.items()}
    return value


def same(found: Any, expected: Any, tolerance: float) -> bool:
    """True if two values that went through `plain` are equal; numbers up to a tolerance, see `close`."""
    if type(found) in _NUMBERS and type(expected) in _NUMBERS:
        return found == expected or (tolerance > 0 and close(found, expected, tolerance))
    if type(found) is list and type(expected) is list:
        return len(found) == len(expected) and all(
            same(one, other, tolerance) for one, other in zip(found, expected, strict=True)
        )
    if type(found) is dict and type(expected) is dict:
        return found.keys() == expected.keys() and all(same(found[key], expected[key], tolerance) for key in found)
    return bool(found == expected)


def same_in_any_order(found: Any, expected: Any, tolerance: float) -> bool:
    """`same`, but that the elements of the two lists may come in any order."""
    if isinstance(found, set | frozenset):
        found = plain(list(found))
    if type(found) is not list or type(expected) is not list:
        return same(found, expected, tolerance)
    return match_in_any_order(found, expected, lambda one, other: same(one, other, tolerance))


def match_in_any_order(found: list, expected: list, equal: Callable[[Any, Any], bool]) -> bool:
    """True if each element of one list can be paired with an element of the other that it equals."""
    if len(found) != len(expected):
        return False
    # What is exactly equal has the same key; only the rest has to be tried with each other.
    unpaired: dict[Any, list] = defaultdict(list)
    for each in expected:
        unpaired[_hashable(each)].append(each)
    rest = []
    for each in found:
        if exactly := unpaired.get(_hashable(each)):
            exactly.pop()
        else:
            rest.append(each)
    if len(rest) > _MOST_TRIED:
        return False
    left = [each for exactly in unpaired.values() for each in exactly]
    for each in rest:
        match = next((index for index, other in enumerate(left) if equal(each, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def close(found: float, expected: float, tolerance: float) -> bool:
    """True if two numbers differ by at most `tolerance`, or by that share of the expected one."""
    try:
        return math.isclose(found, expected, rel_tol=0.0, abs_tol=tolerance * max(1.0, abs(float(expected))))
    except OverflowError:  # an integer beyond all floats
        return False


def _key(key: Any) -> Any:
    if isinstance(key, bool):
        return "true" if key else "false"
    if key is None:
        return "null"
    return str(key) if isinstance(key, int | float) else key


def _hashable(value: Any) -> Any:
    """Return what is equal for two values that went through `plain` if they are, and can be hashed."""
    if type(value) is list:
        return ("list", *map(_hashable, value))
    if type(value) is dict:
        return ("dict", frozenset((key, _hashable(each)) for key, each in value.items()))
    try:
        hash(value)
    except TypeError:  # no value that comes from JSON: equal to none of them
        return object()
    return value
