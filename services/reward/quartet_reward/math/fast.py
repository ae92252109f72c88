"""Compares rational numbers exactly.

It reads integers, decimals, fractions, mixed numbers, scientific notation and vulgar fractions, with signs, thousands
separators and a dollar sign; not percent, units, decimal commas or symbols.
"""

import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from quartet_reward.math.spelling import plain

# Exact arithmetic on longer texts or larger exponents could block the service.
_MOST_CHARACTERS = 200
_LARGEST_EXPONENT = 400

_DOLLARS = re.compile(r"^(-?)\\?\$\s*")
_SIGN = r"(?P<sign>[+-]?)\s?"
_INTEGER = r"(?:\d+|[1-9]\d{0,2}(?P<separator>[ ,])\d{3}(?:(?P=separator)\d{3})*)"
_DECIMAL = re.compile(
    rf"{_SIGN}(?P<whole>{_INTEGER})?(?:\.(?P<fraction>\d*))?"
    r"(?:[eE](?P<exponent>[+-]?\d{1,4})"
    r"|\s?(?:\\times|\\cdot|×|\*)\s?10\s?\^\s?(?:\{\s?(?P<power>[+-]?\d{1,4})\s?\}|(?P<digit>\d)))?",
    re.ASCII,
)
_FRACTION = re.compile(
    rf"{_SIGN}(?:(?P<whole>\d+)(?:\s|(?=\\)))?"
    r"(?:(?P<a>\d+)\s?/\s?(?P<b>\d+)|\\frac\s?\{\s?(?P<c>-?\s?\d+)\s?\}\s?\{\s?(?P<d>-?\s?\d+)\s?\})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Rational:
    """A number, and how it was written."""

    value: Fraction
    decimal: bool
    """As a decimal, which may be rounded."""
    divided: bool = field(default=False, compare=False)
    """As a fraction, of which the denominator is not 1."""


def parse_rational(text: str) -> Rational | None:
    """Return the rational number that `text` is, or None if it is ambiguous or something else."""
    if len(text) > _MOST_CHARACTERS:
        return None
    if text.isascii() and text.isdigit():
        return Rational(Fraction(int(text)), decimal=False)  # most answers by far
    return _parse(text)


# A reference is parsed for each completion of its prompt.
@lru_cache(maxsize=4096)
def _parse(text: str) -> Rational | None:
    text = _DOLLARS.sub(r"\1", plain(text))
    if match := _DECIMAL.fullmatch(text):
        return _decimal(match)
    if match := _FRACTION.fullmatch(text):
        return _fraction(match)
    return None


def equal_rationals(answer: Rational, reference: Rational, decimal_places: int = 6) -> bool | None:
    """Return whether the numbers are equal, or None if one may be the other one rounded.

    Decimals closer than ten units of the last of `decimal_places` are left to math-verify.
    """
    if answer.value == reference.value:
        return True
    if not answer.decimal and not reference.decimal:
        return False
    distance = abs(answer.value - reference.value)
    scale = max(abs(answer.value), abs(reference.value))
    surely_different = Fraction(10, 10**decimal_places)
    if distance > surely_different or distance > surely_different * scale:
        return False
    return None


def _decimal(match: re.Match[str]) -> Rational | None:
    whole, fraction = match["whole"], match["fraction"]
    if not whole and not fraction:
        return None
    exponent = int(match["exponent"] or match["power"] or match["digit"] or 0)
    if abs(exponent) > _LARGEST_EXPONENT:
        return None
    digits = (whole or "0").replace(",", "").replace(" ", "") + (fraction or "")
    shift = exponent - len(fraction or "")
    value = Fraction(int(digits)) * Fraction(10) ** shift
    # "7." is the end of a sentence; "7.0" may be rounded.
    return Rational(-value if match["sign"] == "-" else value, decimal=bool(fraction) or exponent != 0)


def _fraction(match: re.Match[str]) -> Rational | None:
    numerator, denominator = (int((match[n] or match[m]).replace(" ", "")) for n, m in ("ac", "bd"))
    mixed = match["whole"] is not None
    if denominator == 0 or (mixed and not 0 < numerator < denominator):  # "2 7/3" is not a mixed number
        return None
    value = int(match["whole"] or 0) + Fraction(numerator, denominator)
    divided = not mixed and denominator != 1
    return Rational(-value if match["sign"] == "-" else value, decimal=False, divided=divided)
