"""Arithmetic on sums of terms: a rational number times the root of a squarefree one times powers of letters."""

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

# Bounds of what is computed in the service's own process.
_MOST_TERMS = 48
_LARGEST_ROOT = 10**6
_MOST_BITS = 2048

Powers = tuple[tuple[str, int], ...]
Monomial = tuple[int, Powers]  # a squarefree number under the root, and the powers of the letters
Terms = Mapping[Monomial, Fraction]

ONE: Monomial = (1, ())


class Undecided(Exception):
    """It is none of the forms that are decided here, or would take too long."""


def add(one: Terms, two: Terms, sign: int) -> Terms:
    """Return one + sign · two. Raises Undecided."""
    total = dict(one)
    for monomial, factor in two.items():
        total[monomial] = total.get(monomial, Fraction(0)) + sign * factor
    return _tidy(total)


def subtract(one: Terms, two: Terms) -> Terms:
    """Return the terms of the difference."""
    return add(one, two, -1)


def multiply(one: Terms, two: Terms) -> Terms:
    """Return the product. Raises Undecided if it has too many terms."""
    if len(one) * len(two) > 2 * _MOST_TERMS:
        raise Undecided
    total: dict[Monomial, Fraction] = {}
    for (root, powers), factor in one.items():
        for (other_root, other_powers), other_factor in two.items():
            outside, inside = _squarefree(root * other_root)
            exponents = dict(powers)
            for name, power in other_powers:
                exponents[name] = exponents.get(name, 0) + power
            monomial = inside, tuple(sorted((name, power) for name, power in exponents.items() if power))
            total[monomial] = total.get(monomial, Fraction(0)) + factor * other_factor * outside
    return _tidy(total)


def _tidy(total: dict[Monomial, Fraction]) -> Terms:
    kept = {monomial: factor for monomial, factor in total.items() if factor}
    if len(kept) > _MOST_TERMS:
        raise Undecided
    if any(
        max(factor.numerator.bit_length(), factor.denominator.bit_length()) > _MOST_BITS for factor in kept.values()
    ):
        raise Undecided
    return kept


def inverse_of_term(terms: Terms) -> Terms:
    """Return one over a single term. Raises Undecided."""
    if len(terms) != 1:
        raise Undecided
    (((root, powers), factor),) = terms.items()
    return {(root, tuple((name, -power) for name, power in powers)): 1 / (factor * root)}


def square_root(terms: Terms) -> Terms:
    """Return the root of a rational number that is not negative. Raises Undecided."""
    value = terms.get(ONE, Fraction(0))
    if value < 0:
        raise Undecided
    if not value:
        return {}
    outside, inside = _squarefree(value.numerator * value.denominator)
    return {(inside, ()): Fraction(outside, value.denominator)}


@lru_cache(maxsize=4096)
def _squarefree(number: int) -> tuple[int, int]:
    """Return (a, b) with number = a² · b and b squarefree."""
    if number > _LARGEST_ROOT:
        raise Undecided
    outside, inside, divisor = 1, number, 2
    while divisor * divisor <= inside:
        while inside % (divisor * divisor) == 0:
            inside //= divisor * divisor
            outside *= divisor
        divisor += 1
    return outside, inside
