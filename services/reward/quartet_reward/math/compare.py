"""Compares two forms part by part, down to numbers and words; subclasses compare other expressions."""

import re
from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from quartet_reward.math.fast import Rational, equal_rationals, parse_rational
from quartet_reward.math.forms import Form, Kind
from quartet_reward.math.notation import tokens
from quartet_reward.math.quantities import same_unit


class EqualityPolicy(BaseModel):
    """Parameters of `math`: what counts as equal."""

    model_config = ConfigDict(frozen=True)

    chains: Literal["each", "last"] = Field(
        "each", description="Of x = 3 + 4 = 8: each side must be the value, or the last one alone counts."
    )
    bare_braces: Literal["set", "group"] = Field(
        "set", description="{1, 2} without backslashes is a set, or the bare list 1, 2 as TeX prints it."
    )
    relations_as_sets: bool = Field(True, description="The set (1, 2) may be answered by 1 < x < 2.")
    any_names: bool = Field(False, description="Variables count by their place: f(x) is f(y).")
    decimal_places: int = Field(6, ge=1, le=15, description="Places in which a decimal and another number must agree.")
    unevaluated: bool = Field(False, description="A number may be answered by a computation: 391 by 17*23.")


STRICT = EqualityPolicy()

# Longer lists are not compared element by element.
_MOST_ELEMENTS = 64
# Three and more letters that are a run of the alphabet are ranked: C, A, B is not A, B, C.
_SHORTEST_RANKING = 3
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d{1,2}|(?<=\b0,)\d{3}|\d{4,})", re.ASCII)
_DECIMAL = re.compile(r"[-+]?\d*(?:\.(\d*))?", re.ASCII)
_SET_COMMAND = re.compile(r"\\(?:mathbb|cup|cap|setminus|R)(?![a-zA-Z])")

Decision = bool | None


class Unevaluated(Exception):
    """The answer equals the reference, but leaves something to compute; the message says what."""


class Comparison:
    """Compares numbers and words exactly; a subclass decides the rest.

    Each method returns None where it cannot decide, and raises Unevaluated for an equal answer that leaves a
    computation to the reader, unless the policy allows it.
    """

    def __init__(self, policy: EqualityPolicy):
        self.policy = policy

    def expressions(self, answer: str, reference: str) -> Decision:
        """Return whether two expressions, equations or relations are equal."""
        found, expected = parse_rational(answer), parse_rational(reference)
        if found is None or expected is None:
            letters = len(answer) == len(reference) == 1 and (answer + reference).isalpha()
            return answer.casefold() == reference.casefold() if letters and not self.policy.any_names else None
        equal = equal_rationals(found, expected, self.policy.decimal_places)
        if equal and found.divided and not self.policy.unevaluated and _is_whole(expected):
            raise Unevaluated("a quotient")
        return equal

    def rounds(self, exact: str, rounded: str) -> Decision:
        """Return whether one expression is the other one rounded to its written places."""
        values = parse_rational(exact), parse_rational(rounded)
        if values[0] is None or values[1] is None:
            return None
        return abs(values[0].value - values[1].value) <= max(half_a_place(exact), half_a_place(rounded))

    def equal(self, answer: Form, reference: Form) -> Decision:
        if answer.kind is Kind.EQUATION and _is_tautology(answer):
            return False
        if answer.kind is not Kind.WORDS and tokens(answer.text) == tokens(reference.text):
            return True
        decided = self._equal(answer, reference)
        if decided is False and self.policy.any_names:
            return self.expressions(answer.text, reference.text)
        return decided

    def _equal(self, answer: Form, reference: Form) -> Decision:
        if Kind.FAMILY in (answer.kind, reference.kind):
            return self._families(answer, reference)
        if reference.kind is Kind.ROUNDED:
            return self.equal(answer, reference.parts[0])
        if answer.kind is Kind.ROUNDED:
            exact, rounded = answer.parts
            value = exact.parts[-1] if exact.kind is Kind.EQUATION else exact
            rounds = self.policy.chains == "last" or self.rounds(value.text, rounded.text)
            return _all([self._allowing_computations().equal(exact, reference), rounds])
        match answer.kind, reference.kind:
            case (Kind.VALUE, Kind.VALUE) | (Kind.RELATION, Kind.RELATION):
                return self._whole(answer, reference)
            case (Kind.WORDS, Kind.WORDS):
                return answer.mark == reference.mark
            case (Kind.RATIO, Kind.RATIO):
                return _same_ratio(answer, reference)
            case (Kind.CLOCK, Kind.CLOCK | Kind.RATIO | Kind.VALUE) | (Kind.RATIO | Kind.VALUE, Kind.CLOCK):
                return _same_time(answer, reference)
            case (Kind.TUPLE, Kind.TUPLE) | (Kind.MATRIX, Kind.MATRIX) | (Kind.AMOUNTS, Kind.AMOUNTS):
                return self._in_order(answer, reference)
            case (Kind.NAMED, Kind.NAMED):
                return self._named(answer, reference)
            case (Kind.NAMED, Kind.TUPLE | Kind.LIST) | (Kind.TUPLE | Kind.LIST, Kind.NAMED):
                return self._values_in_order(answer, reference)
            case (Kind.TUPLE, Kind.LIST) | (Kind.LIST, Kind.TUPLE):
                return self._tuple_and_list(answer, reference)
            case (Kind.LIST | Kind.SET, Kind.LIST | Kind.SET):
                return self._elements(answer, reference)
            case (Kind.MATRIX, Kind.TUPLE) | (Kind.TUPLE, Kind.MATRIX):
                return self._column(answer, reference)
            case (Kind.EQUATION, Kind.EQUATION):
                return self._equations(answer, reference)
            case (Kind.QUANTITY, Kind.QUANTITY):
                return self._quantities(answer, reference)
            case (Kind.LIST, Kind.VALUE) | (Kind.VALUE, Kind.LIST):
                return self._list_and_value(answer, reference)
            case (Kind.SET, Kind.VALUE) | (Kind.VALUE, Kind.SET):
                return self._single(answer, reference)
            case (Kind.TUPLE, Kind.VALUE) | (Kind.VALUE, Kind.TUPLE):
                return self._interval_and_value(answer, reference)
            case (Kind.MATRIX | Kind.RATIO, Kind.VALUE) | (Kind.VALUE, Kind.MATRIX | Kind.RATIO):
                return self._whole(answer, reference)
            case (Kind.LIST, Kind.RELATION) | (Kind.RELATION, Kind.LIST):
                return self._whole(answer, reference)
            case (Kind.RELATION, Kind.TUPLE | Kind.VALUE | Kind.SET) | (
                Kind.TUPLE | Kind.VALUE | Kind.SET,
                Kind.RELATION,
            ):
                return self._relations(answer, reference)
            case (Kind.LIST, Kind.TUPLE | Kind.VALUE) | (Kind.TUPLE | Kind.VALUE, Kind.LIST):
                return False
        if Kind.EQUATION in (answer.kind, reference.kind):
            return self._one_equation(answer, reference)
        if Kind.QUANTITY in (answer.kind, reference.kind):
            return self._one_quantity(answer, reference)
        return False

    def _allowing_computations(self) -> "Comparison":
        return type(self)(self.policy.model_copy(update={"unevaluated": True}))

    def _whole(self, answer: Form, reference: Form) -> Decision:
        return self.expressions(answer.text, reference.text)

    def _in_order(self, answer: Form, reference: Form) -> Decision:
        alike = len(answer.parts) == len(reference.parts) and (
            answer.mark == reference.mark or answer.kind is not reference.kind
        )
        if not alike or len(answer.parts) > _MOST_ELEMENTS:
            return False
        return _all(self.equal(*pair) for pair in zip(answer.parts, reference.parts, strict=True))

    def _tuple_and_list(self, answer: Form, reference: Form) -> Decision:
        """Compare a tuple with a list: `1, 2` may mean the pair (1, 2)."""
        brackets = answer.mark if answer.kind is Kind.TUPLE else reference.mark
        return self._in_order(answer, reference) if brackets == "()" else False

    def _column(self, answer: Form, reference: Form) -> Decision:
        """Compare a vector in parentheses with a column of a matrix."""
        matrix, vector = (answer, reference) if answer.kind is Kind.MATRIX else (reference, answer)
        column = set(matrix.mark.split()) == {"1"} and vector.mark == "()"
        return self._in_order(answer, reference) if column else False

    def _named(self, answer: Form, reference: Form) -> Decision:
        """Compare the values of several variables, by name."""
        found = dict(zip(answer.mark.split(), answer.parts, strict=True))
        expected = dict(zip(reference.mark.split(), reference.parts, strict=True))
        if found.keys() != expected.keys():
            return False
        return _all(self.equal(found[name], expected[name]) for name in expected)

    def _values_in_order(self, answer: Form, reference: Form) -> Decision:
        """Compare named values with values alone, which stand in the names' order: `x = 2, y = 3` with (2, 3)."""
        alone = answer if answer.kind is not Kind.NAMED else reference
        if alone.mark not in ("", "()") or len(answer.parts) != len(reference.parts):
            return False
        return _all(self.equal(*pair) for pair in zip(answer.parts, reference.parts, strict=True))

    def _elements(self, answer: Form, reference: Form) -> Decision:
        """Compare in any order, ignoring repetitions; a ranking of letters has an order."""
        if answer.mark and reference.mark and answer.mark != reference.mark:
            return False  # values of x, not of y
        if max(len(answer.parts), len(reference.parts)) > _MOST_ELEMENTS:
            return False
        if _is_ranking(reference):
            return self._in_order(answer, reference)
        found = [self._any(part, reference.parts, self.equal) for part in answer.parts]
        expected = [
            self._any(part, answer.parts, lambda one, other: self.equal(other, one)) for part in reference.parts
        ]
        return _all([*found, *expected])

    def _list_and_value(self, answer: Form, reference: Form) -> Decision:
        """Compare a list with a value: `1,22` may be 1.22; `\\frac12, 50\\%` is one value twice, but `4, 4` is no 4."""
        listed, other = (answer, reference) if answer.kind is Kind.LIST else (reference, answer)
        match, value = _DECIMAL_COMMA.fullmatch(listed.text), parse_rational(other.text)
        if match is not None and value is not None and value.decimal:
            return self.expressions(f"{match[1]}.{match[2]}", other.text)
        spellings = {tokens(part.text) for part in listed.parts}
        several = listed.mark or len(spellings) == len(listed.parts)
        if listed is reference or not several or len(listed.parts) > _MOST_ELEMENTS:
            return False
        return _all(self.equal(part, reference) for part in answer.parts)

    def _any(self, one: Form, others: Sequence[Form], equal: Callable[[Form, Form], Decision]) -> Decision:
        decisions = [equal(one, other) for other in others]
        return True if True in decisions else None if None in decisions else False

    def _single(self, answer: Form, reference: Form) -> Decision:
        """Compare a set with a value: a set of one element equals the element."""
        one, other = (form.parts[0] if form.kind is Kind.SET else form for form in (answer, reference))
        lone = all(form.kind is not Kind.SET or len(form.parts) == 1 for form in (answer, reference))
        return self.equal(one, other) if lone else self._whole(answer, reference)

    def _relations(self, answer: Form, reference: Form) -> Decision:
        """Compare a relation with a set; as the answer, a relation is equal to a set only if the policy allows it."""
        allowed = self.policy.relations_as_sets or reference.kind is Kind.RELATION
        return self._whole(answer, reference) if allowed else False

    def _interval_and_value(self, answer: Form, reference: Form) -> Decision:
        """Compare an interval with a union or \\mathbb{R}; it equals no number, so [7,7] is not 7."""
        value = answer if answer.kind is Kind.VALUE else reference
        return self._whole(answer, reference) if _SET_COMMAND.search(value.text) else False

    def _quantities(self, answer: Form, reference: Form) -> Decision:
        if not same_unit(answer.mark, reference.mark):
            return False
        return self.equal(answer.parts[0], reference.parts[0])

    def _one_quantity(self, answer: Form, reference: Form) -> Decision:
        """Compare a quantity with a number: a missing unit is ignored. 50% is 0.5, and 50, but 0.5% is not 0.5."""
        measured, other = (answer, reference) if answer.kind is Kind.QUANTITY else (reference, answer)
        number = measured.parts[0]
        if measured.mark != "percent":
            return self.equal(number, other) if measured is answer else self.equal(other, number)
        value = parse_rational(number.text)
        if value is None or abs(value.value) >= 1:
            as_number = self.equal(number, other) if measured is answer else self.equal(other, number)
            if as_number is not False:
                return as_number
        if value is not None:
            share = value.value / 100
            hundredth = (
                str(share.numerator)
                if share.denominator == 1
                else rf"\frac{{{share.numerator}}}{{{share.denominator}}}"
            )
        else:
            hundredth = rf"({number.text}) \cdot \frac{{1}}{{100}}"
        if measured is answer:
            return self.expressions(hundredth, other.text)
        return self.expressions(other.text, hundredth)

    def _equations(self, answer: Form, reference: Form) -> Decision:
        """Compare equations: `x = 5` equals `5 = x`, `2x - y = 3` equals `y = 2x - 3`; `2x = 10` is not `x = 5`."""
        value = reference.value
        if value is None:
            return self._whole(answer, reference)
        if not reference.mark or _same_name(answer.mark, reference.mark):
            return self._each_side(answer.parts[1:] if answer.mark else answer.parts, value)
        # xy = 1 may be a product, while x = 5 is not y = 5.
        named = len(reference.mark) == 1 and parse_rational(value.text)
        return False if named else self._whole(answer, reference)

    def _one_equation(self, answer: Form, reference: Form) -> Decision:
        if reference.kind is Kind.EQUATION:
            return self._whole(answer, reference) if reference.value is None else self.equal(answer, reference.value)
        return self._each_side(answer.parts[1:] if answer.mark else answer.parts, reference)

    def _each_side(self, sides: Sequence[Form], reference: Form) -> Decision:
        """Compare each side with a value: `x = 7` and `3 + 4 = 7` give 7; `8 = 7` does not, nor `5x - 7y = 0` 0.

        One side must be evaluated.
        """
        if self.policy.chains == "last" or len(sides) == 1:
            return self.equal(sides[-1], reference)
        lenient, left = self._allowing_computations(), []
        decided = _all(lenient.equal(side, reference) for side in sides)
        if decided is not True:
            return decided
        for side in sides:
            try:
                if self.equal(side, reference):
                    return True
            except Unevaluated as error:
                left.append(error)
        raise left[-1]

    def _families(self, answer: Form, reference: Form) -> Decision:
        """Compare expressions with a letter that stands for every number of a set; the letter's name does not count."""
        if answer.kind is not reference.kind:
            one, other = (form.parts[0] if form.kind is Kind.FAMILY else form for form in (answer, reference))
            return self.equal(one, other)
        (letter, *domain), (wanted, *wanted_domain) = answer.mark.split(), reference.mark.split()
        if domain and wanted_domain and domain != wanted_domain:
            return False
        if letter == wanted:
            return self.equal(answer.parts[0], reference.parts[0])
        named_alike = answer.parts[0].kind is reference.parts[0].kind is Kind.EQUATION
        texts = [form.parts[0].parts[-1].text if named_alike else form.parts[0].text for form in (answer, reference)]
        return self.expressions(re.sub(rf"(?<![a-zA-Z\\]){letter}(?![a-zA-Z])", wanted, texts[0]), texts[1])


def _is_whole(number: Rational) -> bool:
    return number.value.denominator == 1 and not number.divided


def _is_ranking(reference: Form) -> bool:
    letters = [part.text for part in reference.parts]
    if reference.kind is not Kind.LIST or len(letters) < _SHORTEST_RANKING:
        return False
    if not all(len(letter) == 1 and letter.isupper() for letter in letters) or len(set(letters)) < len(letters):
        return False
    return ord(max(letters)) - ord(min(letters)) == len(letters) - 1


def _same_ratio(answer: Form, reference: Form) -> bool:
    """Return whether ratios are equal; a reference that could be reduced, such as 3:30, is a time."""
    found, expected = ([int(part.text) for part in form.parts] for form in (answer, reference))
    if len(found) != len(expected) or gcd(*expected) != 1 or not gcd(*found):
        return found == expected
    return [value // gcd(*found) for value in found] == expected


def _same_time(answer: Form, reference: Form) -> bool:
    """Compare times of day, of which one may lack "a.m." or "p.m.": 15:30 is 3:30 pm, and so is 3:30."""
    clock, other = (answer, reference) if answer.kind is Kind.CLOCK else (reference, answer)
    if other.kind is Kind.CLOCK:
        return clock.mark == other.mark
    written = other.text.replace(" ", "") if ":" in other.text else f"{other.text}:00"
    hour, _, minute = clock.mark.partition(":")
    return written.lstrip("0") in (f"{hour}:{minute}".lstrip("0"), f"{(int(hour) - 1) % 12 + 1}:{minute}")


def _same_name(one: str, other: str) -> bool:
    """Return whether two names are the same: W(n) is W(x), and y = x^2 is f(x) = x^2."""
    functions = [name.partition("(")[0] if "(" in name else "" for name in (one, other)]
    if all(functions):
        return functions[0] == functions[1]
    return one == other or ("y" in (one, other) and any(functions))


def _is_tautology(equation: Form) -> bool:
    sides = [tokens(side.text) for side in equation.parts]
    return len(set(sides)) < len(sides) and len(set(sides)) == 1


def half_a_place(text: str) -> float:
    """Return half a unit of the last written decimal place, the largest rounding error."""
    match = _DECIMAL.fullmatch(text.strip())
    return 0.5 * 10.0 ** -len(match[1] or "") if match else 0.0


def _all(decisions: Iterable[Decision]) -> Decision:
    """Return False if one is False, True if all are True, else None."""
    undecided = False
    for decision in decisions:
        if decision is False:
            return False
        undecided |= decision is None
    return None if undecided else True
