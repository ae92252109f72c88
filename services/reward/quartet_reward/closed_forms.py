"""Closed forms, exactly: sums of rational multiples of square roots, powers of π, i, e and variables.

`3\\sqrt{13}`, `\\frac{11+9a}{20}`, `-2+7i`, `x^3+3x-6`. Each has one normal form, for square roots of different
squarefree numbers, powers of π and variables are linearly independent over the rationals. So two of them are equal if
and only if their normal forms are: no library needs to be asked, and nothing is rounded. What could be read in several
ways (`1/2x`, `f(x)`, `2\\frac{1}{2}`) is not decided here. Functions of variables, roots of sums and one over a sum are
parts that are equal if written alike; if not, it is for the library to tell.
"""

import hashlib
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from quartet_reward.terms import ONE, Monomial, Terms, Undecided, add, inverse_of_term, multiply, square_root

# Bounds of what is computed in the service's own process.
_MOST_CHARACTERS = 160
_LARGEST_POWER = 16
_MOST_DIGITS = 24
_MOST_DEPTH = 24
_MOST_PRODUCTS = 64

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\.\d+|[a-zA-Z]+|\s+|.", re.ASCII | re.DOTALL)
_IGNORED = frozenset([r"\,", r"\;", r"\:", r"\!", r"\ ", r"\left", r"\right", "~"])
_TIMES = frozenset([r"\cdot", r"\times", "*", "·", "×"])
_FRACTIONS = frozenset([r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"])
_FUNCTIONS = frozenset([r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc", r"\ln", r"\log", r"\arctan"])
# Letters that stand side by side as factors: not "or", "pi", "cm".
_FACTORS = frozenset("abcknrxyz")
# Letters before a parenthesis that are factors rather than functions.
_NO_FUNCTIONS = frozenset("abckmnrtxyz")


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """A normal form; equal values have equal `terms`."""

    terms: Terms
    decimal: bool
    """A decimal is written in it, which may be rounded."""
    opaque: bool = False
    """It has parts that are told by their form alone, such as \\tan x: different forms may yet be equal."""

    def key(self) -> frozenset[tuple[Monomial, Fraction]]:
        """Return the terms in a form that can be a member of a set."""
        return frozenset(self.terms.items())


@lru_cache(maxsize=4096)
def parse_closed_form(text: str) -> ClosedForm | None:
    """Return the normal form of `text`, or None if it is not unambiguously one of those read here."""
    if len(text) > _MOST_CHARACTERS:
        return None
    tokens = [token for token in _TOKEN.findall(text) if not token.isspace() and token not in _IGNORED]
    reader = _Reader([*_split_letters(tokens), ""])
    try:
        terms = reader.sum()
        reader.expect("")
    except Undecided:
        return None
    if any(name == "i" and not 0 <= power <= 1 for _, powers in terms for name, power in powers):
        return None  # the square of i: of the imaginary unit, or of a variable
    return ClosedForm(terms, reader.decimal, reader.opaque)


def equal_closed_forms(answer: ClosedForm, reference: ClosedForm) -> bool | None:
    """Return whether the values are equal, or None where one may be a rounded or another form of the other."""
    if answer.terms == reference.terms:
        return True
    return None if answer.decimal or reference.decimal or answer.opaque or reference.opaque else False


def _split_letters(tokens: list[str]) -> list[str]:
    out: list[str] = []
    for token in tokens:
        if token.isascii() and token.isalpha() and len(token) > 1:
            if len(token) > 2 or not _FACTORS.issuperset(token):
                return ["?"]
            out += token
        else:
            out.append(token)
    return out


@dataclass(slots=True)
class _Reader:
    """Reads tokens by recursive descent; the depth is bounded by the length of the text."""

    tokens: list[str]
    position: int = 0
    decimal: bool = False
    opaque: bool = False
    depth: int = 0
    products: int = 0

    @property
    def token(self) -> str:
        return self.tokens[self.position]

    def expect(self, token: str) -> None:
        if self.token != token:
            raise Undecided
        self.position += bool(token)

    def multiplied(self, one: Terms, two: Terms) -> Terms:
        self.products += 1
        if self.products > _MOST_PRODUCTS:
            raise Undecided
        return multiply(one, two)

    def sum(self) -> Terms:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise Undecided
        total = self.terms()
        self.depth -= 1
        return total

    def terms(self) -> Terms:
        total: Terms = {}
        sign = 1
        if self.token in ("+", "-"):
            sign = -1 if self.token == "-" else 1
            self.position += 1
        while True:
            total = add(total, self.product(), sign)
            if self.token not in ("+", "-"):
                return total
            sign = -1 if self.token == "-" else 1
            self.position += 1

    def product(self) -> Terms:
        before = self.token
        value, divided = self.power(), False
        while True:
            if self.token in _TIMES:
                if divided:
                    raise Undecided
                self.position += 1
                value = self.multiplied(value, self.power())
            elif self.token == "/":
                if divided:
                    raise Undecided
                self.position += 1
                value, divided = self.multiplied(value, self.inverse(self.power())), True
            elif self._begins_a_factor():
                if divided or (before[0].isdigit() and (self.token[0].isdigit() or self.token in _FRACTIONS)):
                    raise Undecided  # 1/2x, and mixed numbers
                if before in _FRACTIONS and self.token[0].isdigit():
                    raise Undecided
                if before.isalpha() and self.token == "(" and before not in _NO_FUNCTIONS:
                    raise Undecided
                before = self.token
                value = self.multiplied(value, self.power())
            else:
                return value

    def _begins_a_factor(self) -> bool:
        token = self.token
        return bool(token) and (
            token[0].isalnum() or token in ("(", "{", r"\pi", r"\sqrt") or token in _FRACTIONS | _FUNCTIONS
        )

    def power(self) -> Terms:
        base = self.atom()
        if self.token != "^":
            return base
        self.position += 1
        if self.token == "{":
            self.position += 1
            exponent = self.integer()
            self.expect("}")
        elif len(self.token) > 1:
            raise Undecided  # x^10: for TeX x¹0, for who types it the tenth power
        else:
            exponent = self.integer()
        if not 0 <= exponent <= _LARGEST_POWER:
            raise Undecided
        value: Terms = {ONE: Fraction(1)}
        for _ in range(exponent):
            value = self.multiplied(value, base)
        return value

    def integer(self) -> int:
        token = self.token
        if not (token.isascii() and token.isdigit()) or len(token) > 3:
            raise Undecided
        self.position += 1
        return int(token)

    def atom(self) -> Terms:
        token = self.token
        if not token:
            raise Undecided
        self.position += 1
        if token in ("(", "{"):
            inner = self.sum()
            self.expect(")" if token == "(" else "}")
            return inner
        if token in _FRACTIONS:
            return self.multiplied(self.argument(), self.inverse(self.argument()))
        if token == r"\sqrt":
            return self.root(self.argument())
        if token in _FUNCTIONS:
            return self.function(token)
        if token == r"\pi" or (token.isascii() and token.isalpha()):
            return {(1, ((token, 1),)): Fraction(1)}
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return self.number(token)
        raise Undecided

    def function(self, name: str) -> Terms:
        if self.token not in ("(", "{") and not (self.token.isascii() and self.token.isalpha()):
            raise Undecided
        argument = self.atom()
        if self.token == "^" or (self.token and (self.token[0].isalnum() or self.token in ("(", "{"))):
            raise Undecided  # the sine of x, times y, or of xy
        if not any(letter != r"\pi" for _, powers in argument for letter, _ in powers):
            raise Undecided  # a constant, and perhaps none, such as the tangent of π/2
        return self.opaque_part(name, argument, 1)

    def inverse(self, terms: Terms) -> Terms:
        if len(terms) > 1:
            return self.opaque_part("sum", terms, -1)
        return inverse_of_term(terms)

    def root(self, terms: Terms) -> Terms:
        if terms and set(terms) != {ONE}:
            return self.opaque_part("root", terms, 1)
        return square_root(terms)

    def opaque_part(self, name: str, of: Terms, power: int) -> Terms:
        self.opaque = True
        # Parts stand in parts: a digest keeps their names from growing with the depth.
        form = hashlib.blake2b(repr(sorted(of.items())).encode(), digest_size=16).hexdigest()
        return {(1, ((f"{name} {form}", power),)): Fraction(1)}

    def argument(self) -> Terms:
        """What follows a command: a group, or one digit or letter (`\\frac12`)."""
        token = self.token
        if token == "{" or token.startswith("\\"):
            return self.atom()
        if token.isdigit() and len(token) > 1:
            self.tokens[self.position : self.position + 1] = [token[0], token[1:]]
        elif not (token.isascii() and token.isalnum()):
            raise Undecided
        return self.atom()

    def number(self, token: str) -> Terms:
        if len(token) > _MOST_DIGITS:
            raise Undecided
        self.decimal |= "." in token
        value = Fraction(token)
        return {ONE: value} if value else {}
