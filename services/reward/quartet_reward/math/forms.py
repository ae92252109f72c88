"""Parses the structure of an answer: value, words, list, tuple, matrix, equation, relation, quantity. Text only."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import product

from quartet_reward.math.fast import parse_rational
from quartet_reward.math.notation import (
    bracketed,
    is_name,
    plain,
    quantity,
    split_outside_brackets,
    tokens,
    without_group,
)

_MOST_SIGNS = 3
_SIDES = 2
_SHORTEST_WORD = 2
_RELATIONS = frozenset(["<", ">", r"\le", r"\ge", r"\ne"])
_OUTER_SEPARATORS, _SEPARATORS = frozenset([";"]), frozenset([",", r"\quad"])
_EQUALS, _APPROX = frozenset(["="]), frozenset([r"\approx"])
AND_OR = re.compile(r"\s*,?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-z])\s*,?")
SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_MEMBER = re.compile(r"[a-zA-Z]\s*\\in(?![a-zA-Z])\s*(.*)", re.DOTALL)
_SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?|R)\s*)?[|:](.*)\\\}", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{[pbB]?(?:small)?matrix\}(.*?)(?:\\\\\s*)?\\end\{[pbB]?(?:small)?matrix\}", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{([^{}\\]*)\}")
_CHOICE = re.compile(r"\(\s*(?:\\text\s*\{\s*)?([A-Z])\s*\}?\s*\)")
# An expression is reduced from the inside out: each atom becomes A, then each term of As becomes A.
_ATOM = re.compile(r"\\(?!(?:pi|infty|theta|alpha|beta)(?![a-zA-Z]))[a-zA-Z]+|(\d+(?:\.\d+)?|[a-zA-Z]|\\[a-zA-Z]+)")
_SUM = r"[-+]?A(?:(?:[-+*/]|\\cdot|\\times)?A)*"
_MADE_OF_ATOMS = re.compile(
    rf"\\frac\{{{_SUM}\}}\{{{_SUM}\}}|\\sqrt(?:A|\{{{_SUM}\}})|A\^(?:A|\{{{_SUM}\}})|\({_SUM}\)"
)
_INTERVAL = rf"[(\[]{_SUM},{_SUM}[)\]]"
_EXPRESSION = re.compile(rf"{_SUM}|{_INTERVAL}(?:\\cup{_INTERVAL})*")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-z]{2,}", re.IGNORECASE)
_ZERO_BELOW = re.compile(r"[{/]\s*0(?![.\d])")
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)", re.ASCII)
_WORDS = re.compile(r"[^\W_]+(?:[ ,:'’.-]+[^\W_]+)*[.!]?")
_ARGUMENTS = re.compile(r"(?<=\w)\([\w,|]*\)$")
# Words with a mathematical meaning.
_MATHEMATICAL = frozenset(
    re.findall(
        r"\w+",
        """
        sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt frac lim max min mod gcd lcm det
        inf infty infinity infinite undefined none null nan true false empty oplus begin end if for
        alpha beta gamma delta epsilon zeta eta theta iota kappa lambda omicron rho sigma tau upsilon phi chi psi omega
        degree degrees percent dollars cents and or union cup cap pmatrix
        """,
    )
)


class Kind(StrEnum):
    """The kind of a form; the comment says what its parts and its mark are."""

    VALUE = "value"  # an expression; no parts
    WORDS = "words"  # mark: the words, case-folded
    CLOCK = "time of day"  # mark: hours and minutes
    LIST = "list"  # elements; mark: the variable whose values they are, if any
    SET = "set"  # elements in braces
    TUPLE = "tuple"  # elements in order; mark: the brackets
    MATRIX = "matrix"  # cells; mark: the shape
    EQUATION = "equation"  # sides; mark: the variable that it defines, if any
    RELATION = "relation"  # an inequality; no parts
    QUANTITY = "quantity"  # the number; mark: the unit
    ROUNDED = "approximation"  # the exact and the rounded side


@dataclass(frozen=True, slots=True)
class Form:
    """The structure of an answer; `text` is all of it, normalized."""

    kind: Kind
    text: str
    parts: tuple["Form", ...] = ()
    mark: str = ""

    def leaves(self) -> Iterator["Form"]:
        """Yield the parts that sympy must be able to parse for this form to be usable."""
        if self.kind is Kind.EQUATION and self.value is not None:
            yield from self.value.leaves()
        elif self.kind is Kind.ROUNDED:
            yield from self.parts[0].leaves()
        elif self.parts and self.kind is not Kind.EQUATION:
            for part in self.parts:
                yield from part.leaves()
        else:
            yield self

    @property
    def value(self) -> "Form | None":
        """The value an equation assigns to its variable, or the last side of a chain (1 + 1 = 3 - 1 = 2); else None."""
        chain = self.kind is Kind.EQUATION and len(self.parts) > _SIDES
        return self.parts[-1] if self.mark or chain else None

    @property
    def is_plain(self) -> bool:
        """Whether it consists of words, numbers and simple expressions, which sympy can parse for certain."""
        return all(
            leaf.kind in (Kind.WORDS, Kind.CLOCK)
            or (leaf.kind is Kind.VALUE and (parse_rational(leaf.text) is not None or _is_expression(leaf.text)))
            for leaf in self.leaves()
        )


@lru_cache(maxsize=4096)
def read(text: str, braces: str = "set") -> Form:
    """Return the form of `text`; `{1, 2}` is a set or, with `braces` "group", a bare list."""
    text = plain(text)
    inner = without_group(text) if text.startswith("{") else text
    if inner != text:
        text = rf"\{{{inner}\}}" if braces == "set" and len(split_outside_brackets(inner, _SEPARATORS)) > 1 else inner
    return _read(text)


def _read(text: str) -> Form:
    while unwrapped := _TEXT.fullmatch(text) or _CHOICE.fullmatch(text):
        text = unwrapped[1].strip()
    if parse_rational(text) is not None and "$" not in text:
        return Form(Kind.VALUE, text)
    for way in (
        _clock,
        _words,
        _relation,
        _list,
        _set,
        _both_signs,
        _brackets,
        _matrix,
        _rounded,
        _equation,
        _measured,
    ):
        if (form := way(text)) is not None:
            return form
    return Form(Kind.VALUE, text)


def _is_expression(text: str) -> bool:
    """Return whether it is a sum, product, quotient, power or root of numbers and letters, or a union of intervals."""
    if _ZERO_BELOW.search(text) or _MATHEMATICAL.intersection(map(str.casefold, _WORD.findall(text))):
        return False
    text, count = _ATOM.sub(lambda match: "A" if match[1] else match[0], text).replace(" ", ""), 1
    while count:
        text, count = _MADE_OF_ATOMS.subn("A", text)
    return _EXPRESSION.fullmatch(text) is not None


def _may_be_product(letters: str) -> bool:
    """Return whether letters are likely a product of variables, such as "x", "abc", "pqrs", rather than a word."""
    ordered = sorted(map(ord, letters))
    return len(letters) < 4 or ordered[-1] - ordered[0] == len(letters) - 1


def _words(text: str) -> Form | None:
    """Parse words that cannot be mathematics: sympy would read them as products, where "east" equals "seat"."""
    bare = _TEXT.sub(r"\1", text)
    if len(bare) > 500 or not _WORDS.fullmatch(bare):
        return None
    words = re.findall(r"[^\W_]+", bare.casefold())
    letters = [word for word in words if word.isalpha()]
    if max(map(len, letters), default=0) < _SHORTEST_WORD or _may_be_product("".join(letters)):
        return None
    return None if _MATHEMATICAL.intersection(words) or quantity(bare) else Form(Kind.WORDS, text, mark=" ".join(words))


def _clock(text: str) -> Form | None:
    match = _CLOCK.fullmatch(text)
    return match and Form(Kind.CLOCK, text, mark=f"{int(match[1])}:{match[2]}")


def _relation(text: str) -> Form | None:
    if member := _MEMBER.fullmatch(text) or _SET_BUILDER.fullmatch(text):
        return _read(member[1].strip())
    found = len(split_outside_brackets(text, _RELATIONS)) > 1
    return Form(Kind.RELATION, text) if found else None


def _list(text: str) -> Form | None:
    listed = AND_OR.sub(",", text)
    for separators in (_OUTER_SEPARATORS, _SEPARATORS):
        parts = [part for part in split_outside_brackets(listed, separators) if part]
        if len(parts) > 1:
            return _collected(Kind.LIST, text, parts, flat=separators is _SEPARATORS)
    return None


def _set(text: str) -> Form | None:
    found = bracketed(text)
    return _collected(Kind.SET, text, found[1]) if found and found[0] == r"\{\}" else None


def _collected(kind: Kind, text: str, elements: list[str], flat: bool = True) -> Form:
    """Return a form of elements: ± gives two, and several equations of one variable give the list of its values."""
    forms: list[Form] = []
    for form in map(_read, elements):
        forms += form.parts if form.kind is Kind.LIST and flat else (form,)
    # W(n) and W(x) name the same function.
    names = {form.mark and _ARGUMENTS.sub("", form.mark) for form in forms if form.kind is Kind.EQUATION}
    if len(names) == 1 and forms[0].kind is Kind.EQUATION and "" not in names:
        return Form(kind, text, tuple(form.parts[-1] if form.kind is Kind.EQUATION else form for form in forms), *names)
    return Form(kind, text, tuple(forms))


def _both_signs(text: str) -> Form | None:
    count = len(SIGNS.findall(text))
    if not 0 < count <= _MOST_SIGNS:
        return None
    # If there is a ∓, all upper signs go together, and all lower ones; otherwise each sign is independent.
    one_choice = r"\mp" in text
    ways = []
    for choice in product("+-", repeat=1 if one_choice else count):
        signs = iter(choice * count if one_choice else choice)
        ways.append("".join(_sign(part, signs) for part in re.split(rf"({SIGNS.pattern})", text)))
    return _collected(Kind.LIST, text, ways)


def _sign(part: str, uppers: Iterator[str]) -> str:
    if not SIGNS.fullmatch(part):
        return part
    upper = next(uppers)
    return f" {upper} " if part == r"\pm" else " - " if upper == "+" else " + "


def _brackets(text: str) -> Form | None:
    found = bracketed(text)
    if found is None or len(found[1]) < 2:
        return None
    return Form(Kind.TUPLE, text, tuple(map(_read, found[1])), found[0])


def _matrix(text: str) -> Form | None:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[1]:
        return None
    rows = [[_read(cell.strip()) for cell in row.split("&")] for row in match[1].split(r"\\")]
    return Form(Kind.MATRIX, text, tuple(cell for row in rows for cell in row), " ".join(str(len(row)) for row in rows))


def _rounded(text: str) -> Form | None:
    """Parse an approximation: `1/3 \\approx 0.333` is 1/3; `x \\approx 11` defines x as an equation does."""
    parts = split_outside_brackets(text, _APPROX)
    if len(parts) != _SIDES or not parts[1]:
        return None
    if not parts[0]:
        return _read(parts[1])
    if is_name(parts[0]):
        return _read(" = ".join(parts))
    return Form(Kind.ROUNDED, text, tuple(map(_read, parts)))


def _equation(text: str) -> Form | None:
    sides = split_outside_brackets(text, _EQUALS)
    if len(sides) < 2 or not all(sides):
        return None
    if is_name(sides[-1]) and not is_name(sides[0]):
        sides.reverse()
    name = "".join(sides[0].split()) if is_name(sides[0]) else ""
    if name and any(tokens(name) == tokens(side) or _occurs(name, side) for side in sides[1:]):
        name = ""
    return Form(Kind.EQUATION, text, tuple(map(_read, sides)), name)


def _occurs(name: str, side: str) -> bool:
    return len(name) == 1 and name in re.sub(r"\\[a-zA-Z]+", " ", side)


def _measured(text: str) -> Form | None:
    found = quantity(text)
    if found is None:
        return None
    number, unit = found
    if unit in ("am", "pm"):
        number = number.removesuffix(":00")
    return Form(Kind.QUANTITY, text, (_read(number),), unit)
