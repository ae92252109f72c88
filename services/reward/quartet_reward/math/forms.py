"""Parses the structure of an answer: value, words, list, tuple, matrix, equation, relation, quantity. Text only."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import product

from quartet_reward.math.fast import parse_rational
from quartet_reward.math.notation import bracketed, is_name, split_outside_brackets, tokens, without_group
from quartet_reward.math.quantities import quantity
from quartet_reward.math.spelling import plain
from quartet_reward.math.words import MATHEMATICAL, TEXT, bare_words, is_run, words_of

_MOST_SIGNS = 3
_RELATIONS = frozenset(["<", ">", r"\le", r"\ge", r"\ne"])
_OUTER_SEPARATORS, _SEPARATORS = frozenset([";"]), frozenset([",", r"\quad"])
_EQUALS, _APPROX = frozenset(["=", r"\equiv"]), frozenset([r"\approx"])
AND_OR = re.compile(r"\s*,?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-z])\s*,?")
SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_MEMBER = re.compile(r"[a-zA-Z]\s*\\in(?![a-zA-Z])\s*(.*)", re.DOTALL)
_SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?|R)\s*)?[|:](.*)\\\}", re.DOTALL)
INTEGERS_WITH = re.compile(
    r"\\\{\s*(?P<letter>[a-zA-Z])\s*\\in\s*\\mathbb\{(?P<set>[ZN])\}\s*(?:[|:]|,)\s*(?P<relation>.*)\\\}", re.DOTALL
)
_MATRIX = re.compile(r"\\begin\{[pbB]?(?:small)?matrix\}(.*?)(?:\\\\\s*)?\\end\{[pbB]?(?:small)?matrix\}", re.DOTALL)
_LETTER = re.compile("[a-zA-Z]")
# A letter that stands for every number of a set: `k\pi, k \in \mathbb{Z}`, `x + c \text{ for all real } c`.
_FOR_ALL = r"\\text\s*\{\s*,?\s*(?:for|where|with)(?:\ (?:any|all|every|some|each))?"
_FAMILY = re.compile(
    rf"""(?P<rest>.+?)[\s,;(]*
        (?:{_FOR_ALL}(?:\ (?:real|integers?))?(?:\ numbers?)?\s*\}}\s*(?P<named>[a-zA-Z])
        |(?:{_FOR_ALL}\s*\}}\s*)?(?P<member>[a-zA-Z])\s*\\in\s*(?P<set>\\mathbb\{{[A-Z]\}}|[ZNRQC])[+*^]*)\)?""",
    re.DOTALL | re.VERBOSE,
)
_UNIT_VECTOR = re.compile(r"(?P<factor>[^\\]*?(?:\\(?!unit)[^\\]*?)*?)\s*\\unit\{(?P<axis>[ijk])\}")
_TIME = re.compile(
    r"(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d))?\s*(?:\\text\s*\{\s*)?(?P<half>[ap])\.?\s?m\.?\s*\}?", re.I
)
_RATIO = re.compile(r"\d{1,9}(?:\s*:\s*\d{1,9})+", re.ASCII)
_TO = re.compile(r"^(\d+) to (\d+)$", re.ASCII)
_AMOUNTS = re.compile(r"\s*(?:,|and)?\s*(?P<number>\d[\d.,/]*)\s+(?P<unit>[A-Za-z][A-Za-z ]*?)\s*(?=,|and\b|\d|$)")
_AND_PART = re.compile(r"\band (?:an?|one) [a-z]+")
_ARGUMENTS = re.compile(r"(?<=\w)\([\w,|]*\)$")


class Kind(StrEnum):
    """The kind of a form; the comment says what its parts and its mark are."""

    VALUE = "value"  # an expression; no parts
    WORDS = "words"  # mark: the words as they are compared
    CLOCK = "time of day"  # mark: hours and minutes
    RATIO = "ratio"  # numbers in order
    LIST = "list"  # elements
    SET = "set"  # elements in braces
    TUPLE = "tuple"  # elements in order; mark: the brackets
    NAMED = "named values"  # the values of several variables; mark: their names
    MATRIX = "matrix"  # cells; mark: the shape
    EQUATION = "equation"  # sides; mark: the variable that it defines, if any
    RELATION = "relation"  # an inequality; no parts
    QUANTITY = "quantity"  # the number; mark: the unit
    AMOUNTS = "quantities"  # quantities of different units, sorted by them
    FAMILY = "family"  # an expression; mark: the letter that stands for every number of a set, and the set
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
        chain = self.kind is Kind.EQUATION and len(self.parts) > 2
        return self.parts[-1] if self.mark or chain else None

    @property
    def is_plain(self) -> bool:
        """Whether it consists of words, numbers and letters, which need no judgment by sympy."""
        return all(
            leaf.kind in (Kind.WORDS, Kind.CLOCK)
            or (leaf.kind is Kind.VALUE and (parse_rational(leaf.text) is not None or _LETTER.fullmatch(leaf.text)))
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
    while unwrapped := TEXT.fullmatch(text):
        text = unwrapped[1].strip()
    if parse_rational(text) is not None and "$" not in text:
        return Form(Kind.VALUE, text)
    for way in (
        _clock, _ratio, _words, _family, _relation, _amounts, _list, _set,
        _both_signs, _brackets, _vector, _matrix, _rounded, _equation, _measured, _phrase,
    ):  # fmt: skip
        if (form := way(text)) is not None:
            return form
    return Form(Kind.VALUE, text)


def _words(text: str) -> Form | None:
    """Parse words, and letters that are no product: sympy would read them as products, where "east" equals "seat"."""
    words = words_of(text)
    if words is None or (measured := _measured(bare_words(text))):
        return None if words is None else measured
    return Form(Kind.VALUE, words) if words.startswith(("\\", "-")) else Form(Kind.WORDS, text, mark=words)


def _phrase(text: str) -> Form | None:
    """Parse what is left and holds words, such as "5 squared": it is no number, and only equal to itself."""
    bare = bare_words(text)
    found = [word for word in re.findall(r"(?:^|\s)([a-zA-Z]{3,})", bare) if word.casefold() not in MATHEMATICAL]
    if "\\" in bare or not found or re.search(r"[=<>^_(){}+*/|\[\]]", bare):
        return None
    return Form(Kind.WORDS, text, mark=" ".join(re.findall(r"[^\W_]+", bare.casefold())))


def _clock(text: str) -> Form | None:
    match = _TIME.fullmatch(text)
    if match is None or not 1 <= int(match["hour"]) <= 12:
        return None
    hour = int(match["hour"]) % 12 + (12 if match["half"].lower() == "p" else 0)
    return Form(Kind.CLOCK, text, mark=f"{hour}:{match['minute'] or '00'}")


def _ratio(text: str) -> Form | None:
    text = _TO.sub(r"\1:\2", text)
    if not _RATIO.fullmatch(text):
        return None
    return Form(Kind.RATIO, text, tuple(Form(Kind.VALUE, part.strip()) for part in text.split(":")))


def _family(text: str) -> Form | None:
    if r"\in" not in text and r"\text" not in text:
        return None
    match = _FAMILY.fullmatch(text)
    if match is None or match["rest"].count("{") != match["rest"].count("}") or match["rest"].startswith("\\{"):
        return None
    letter = match["named"] or match["member"]
    if not _occurs(letter, match["rest"]):
        return None
    return Form(Kind.FAMILY, text, (_read(match["rest"].strip()),), f"{letter} {match['set'] or ''}")


def _relation(text: str) -> Form | None:
    if member := _MEMBER.fullmatch(text) or _SET_BUILDER.fullmatch(text):
        return _read(member[1].strip())
    found = len(split_outside_brackets(text, _RELATIONS)) > 1 or INTEGERS_WITH.fullmatch(text)
    return Form(Kind.RELATION, text) if found else None


def _amounts(text: str) -> Form | None:
    """Parse quantities side by side: `5 ft 6 in`, `2 hours 30 minutes`, `11 hens and 4 goats`."""
    bare, amounts, position = bare_words(text), [], 0
    while match := _AMOUNTS.match(bare, position):
        measured = quantity(f"{match['number']} {match['unit']}")
        if measured is None:
            return None
        amounts.append(Form(Kind.QUANTITY, match[0].strip(), (_read(measured[0]),), measured[1]))
        position = match.end()
    if len(amounts) < 2 or position < len(bare) or len({amount.mark for amount in amounts}) < len(amounts):
        return None
    return Form(Kind.AMOUNTS, text, tuple(sorted(amounts, key=lambda amount: amount.mark)))


def _list(text: str) -> Form | None:
    if _AND_PART.search(text) and (measured := _measured(text)):  # 2 and a half
        return measured
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
    """Return a form of elements, of which ± gives two; several equations give the values of several variables."""
    forms: list[Form] = []
    for form in map(_read, elements):
        forms += form.parts if form.kind is Kind.LIST and flat else (form,)
    # W(n) and W(x) name the same function.
    names = [_ARGUMENTS.sub("", form.mark) for form in forms if form.kind is Kind.EQUATION]
    if 1 < len(names) == len(forms) == len(set(names)) and "" not in names:
        # Neighbors in the alphabet have an order of their own: y = 3, x = 2 is the point (2, 3).
        alphabetical = all(len(name) == 1 for name in names) and is_run("".join(names))
        named = sorted(zip(names, forms, strict=True), key=lambda pair: pair[0] if alphabetical else "")
        return Form(Kind.NAMED, text, tuple(form.parts[-1] for _, form in named), " ".join(name for name, _ in named))
    return Form(kind, text, tuple(forms))


def _both_signs(text: str) -> Form | None:
    signs = SIGNS.findall(text)
    if not 0 < len(signs) <= _MOST_SIGNS:
        return None
    choices: Iterable[Sequence[str]] = product("+-", repeat=len(signs))
    if r"\mp" in signs:  # all upper signs go together, and all lower ones
        choices = zip(*("+-" if sign == r"\pm" else "-+" for sign in signs), strict=True)
    return _collected(Kind.LIST, text, [_with_signs(text, iter(choice)) for choice in choices])


def _with_signs(text: str, signs: Iterator[str]) -> str:
    return SIGNS.sub(lambda _: f" {next(signs)} ", text)


def _brackets(text: str) -> Form | None:
    found = bracketed(text)
    if found is None or len(found[1]) < 2:
        return None
    return Form(Kind.TUPLE, text, tuple(map(_read, found[1])), found[0].replace(r"\langle\rangle", "()"))


def _vector(text: str) -> Form | None:
    """Parse a sum of unit vectors, `\\mathbf{i} + 2\\mathbf{j}`, as the tuple of its components."""
    if r"\unit" not in text:
        return None
    components, position = {"i": "0", "j": "0"}, 0
    while match := _UNIT_VECTOR.match(text, position):
        factor = match["factor"].strip().removeprefix("+").strip()
        components[match["axis"]] = f"{factor}1" if factor in ("", "-") else factor
        position = match.end()
    whole = position == len(text)
    return Form(Kind.TUPLE, text, tuple(map(_read, components.values())), "()") if whole else None


def _matrix(text: str) -> Form | None:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[1]:
        return None
    rows = [[_read(cell.strip()) for cell in row.split("&")] for row in match[1].split(r"\\")]
    return Form(Kind.MATRIX, text, tuple(cell for row in rows for cell in row), " ".join(str(len(row)) for row in rows))


def _rounded(text: str) -> Form | None:
    """Parse an approximation: `1/3 \\approx 0.333` is 1/3; `x \\approx 11` defines x as an equation does."""
    parts = split_outside_brackets(text, _APPROX)
    if len(parts) != 2 or not parts[1]:
        return None
    if not parts[0] or is_name(parts[0]):
        return _read(" = ".join(parts))
    return Form(Kind.ROUNDED, text, tuple(map(_read, parts)))


def _equation(text: str) -> Form | None:
    sides = split_outside_brackets(text, _EQUALS)
    if len(sides) == 2 and not sides[0]:  # "= 72"
        return _read(sides[1])
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
    if (found := quantity(text)) is None:
        return None
    number, unit = found
    return Form(Kind.QUANTITY, text, (_read(number),), unit) if unit else _read(number)
