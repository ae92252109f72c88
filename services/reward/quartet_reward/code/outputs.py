"""Compares what a program printed with the expected output, piece by piece: either may have megabytes."""

import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import zip_longest

from quartet_reward.code.values import Comparison, close

_TOKEN = re.compile(r"\S+")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(
    r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+|inf|infinity|nan)", re.IGNORECASE
)


def same_output(found: str, expected: str, comparison: Comparison) -> bool:
    """Return whether two outputs are the same.

    Trailing white space of lines and empty lines at the end are ignored. With a tolerance, lines are compared token by
    token: see `_same_token`.
    """
    if found == expected:
        return True
    pieces, same = (_tokens, _same_token) if comparison.by_tokens else (_lines, _same_line)
    return all(
        one is not None and other is not None and same(one, other, comparison)
        for one, other in zip_longest(pieces(found), pieces(expected))
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


def _same_line(found: str, expected: str, comparison: Comparison) -> bool:
    if found == expected or not (comparison.tolerance or comparison.ignore_case):
        return found == expected
    return all(
        one is not None and other is not None and _same_token(one, other, comparison)
        for one, other in zip_longest(_tokens(found), _tokens(expected))
    )


def _same_token(found: str, expected: str, comparison: Comparison) -> bool:
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
