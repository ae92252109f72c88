"""Compares two forms part by part, down to numbers and words; subclasses compare other expressions."""

import re
from collections.abc import Collection, Iterable, Sequence
from math import gcd
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from quartet_reward.math.fast import equal_rationals, parse_rational
from quartet_reward.math.forms import Form, Kind
from quartet_reward.math.notation import tokens
from quartet_reward.math.numerals import suffixed_number
from quartet_reward.math.quantities import same_unit
from quartet_reward.math.words import is_run


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
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d{1,2}|(?<=\b0,)\d{3}|\d{4,})", re.ASCII)
_DECIMAL = re.compile(r"[-+]?\d*(?:\.(\d*))?", re.ASCII)
# Kinds whose elements are compared in order.
_IN_ORDER = ({Kind.TUPLE, Kind.LIST, Kind.NAMED}, {Kind.TUPLE, Kind.MATRIX}, {Kind.AMOUNTS})
# Kinds of which only the texts can be compared.
_WHOLE = ({Kind.VALUE}, {Kind.VALUE, Kind.MATRIX}, {Kind.VALUE, Kind.RATIO})
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
        whole = expected.value.denominator == 1 and not expected.divided
        if equal and found.divided and whole and not self.policy.unevaluated:
            raise Unevaluated("a quotient")
        return equal

    def rounds(self, exact: str, rounded: str) -> Decision:
        """Return whether one expression is the other one rounded to its written places."""
        values = parse_rational(exact), parse_rational(rounded)
        if values[0] is None or values[1] is None:
            return None
        return abs(values[0].value - values[1].value) <= max(half_a_place(exact), half_a_place(rounded))

    def equal(self, answer: Form, reference: Form) -> Decision:
        if answer.kind is Kind.EQUATION and len({tokens(side.text) for side in answer.parts}) == 1:
            return False  # 5 = 5
        if answer.kind is not Kind.WORDS and tokens(answer.text) == tokens(reference.text):
            return True
        decided = self._equal(answer, reference)
        return self._whole(answer, reference) if decided is False and self.policy.any_names else decided

    def _equal(self, answer: Form, reference: Form) -> Decision:
        kinds = {answer.kind, reference.kind}
        if reference.kind is Kind.VALUE and parse_rational(reference.text) and (said := suffixed_number(answer.text)):
            return self.expressions(said, reference.text)
        if Kind.FAMILY in kinds:
            return self._families(answer, reference)
        if reference.kind is Kind.ROUNDED:
            return self.equal(answer, reference.parts[0])
        if answer.kind is Kind.ROUNDED:
            return self._rounded(answer, reference)
        if kinds == {Kind.WORDS}:
            return answer.mark == reference.mark
        if kinds == {Kind.RATIO}:
            return _same_ratio(answer, reference)
        if Kind.CLOCK in kinds and kinds <= {Kind.CLOCK, Kind.RATIO, Kind.VALUE}:
            return _same_time(answer, reference)
        if Kind.EQUATION in kinds:
            return self._equations(answer, reference)
        if kinds == {Kind.QUANTITY}:
            return same_unit(answer.mark, reference.mark) and self.equal(answer.parts[0], reference.parts[0])
        if Kind.QUANTITY in kinds:
            return self._one_quantity(answer, reference)
        if kinds == {Kind.NAMED}:
            return self._named(answer, reference)
        if kinds == {Kind.NAMED, Kind.LIST} and Kind.EQUATION in {
            one.kind for one in (*answer.parts, *reference.parts)
        }:
            return False  # x=1, x=2 for a=1, b=2
        if kinds <= {Kind.LIST, Kind.SET}:
            return self._elements(answer, reference)
        if any(kinds <= ordered for ordered in _IN_ORDER):
            return self._in_order(answer, reference)
        if kinds == {Kind.LIST, Kind.VALUE}:
            return self._list_and_value(answer, reference)
        if kinds == {Kind.SET, Kind.VALUE}:
            return self._single(answer, reference)
        if kinds == {Kind.TUPLE, Kind.VALUE}:  # an interval equals a union or \mathbb{R}, but no number: [7,7] is not 7
            value = answer if answer.kind is Kind.VALUE else reference
            return self._whole(answer, reference) if _SET_COMMAND.search(value.text) else False
        if Kind.RELATION in kinds and kinds <= {Kind.RELATION, Kind.TUPLE, Kind.VALUE, Kind.SET, Kind.LIST}:
            allowed = self.policy.relations_as_sets or reference.kind in (Kind.RELATION, Kind.LIST)
            return self._whole(answer, reference) if allowed else False
        return self._whole(answer, reference) if kinds in _WHOLE else False

    def _whole(self, answer: Form, reference: Form) -> Decision:
        return self.expressions(answer.text, reference.text)

    def _rounded(self, answer: Form, reference: Form) -> Decision:
        """Compare the exact side of an approximation, of which the other one must be rounded."""
        exact, rounded = answer.parts
        value = exact.parts[-1] if exact.kind is Kind.EQUATION else exact
        rounds = self.policy.chains == "last" or self.rounds(value.text, rounded.text)
        return _all([self._allowing_computations().equal(exact, reference), rounds])

    def _allowing_computations(self) -> "Comparison":
        return type(self)(self.policy.model_copy(update={"unevaluated": True}))

    def _in_order(self, answer: Form, reference: Form) -> Decision:
        """Compare tuples and the like: `1, 2` may mean (1, 2), a vector be a column, named values be in their order."""
        alike = _brackets(answer) == _brackets(reference) and len(answer.parts) == len(reference.parts)
        if not alike or len(answer.parts) > _MOST_ELEMENTS:
            return False
        return _all(self.equal(*pair) for pair in zip(answer.parts, reference.parts, strict=True))

    def _named(self, answer: Form, reference: Form) -> Decision:
        """Compare the values of several variables, by name."""
        found = dict(zip(answer.mark.split(), answer.parts, strict=True))
        expected = dict(zip(reference.mark.split(), reference.parts, strict=True))
        return found.keys() == expected.keys() and _all(self.equal(found[name], expected[name]) for name in expected)

    def _elements(self, answer: Form, reference: Form) -> Decision:
        """Compare in any order, ignoring repetitions; a ranking of letters has an order."""
        if max(len(answer.parts), len(reference.parts)) > _MOST_ELEMENTS:
            return False
        if _is_ranking(reference):
            return self._in_order(answer, reference)
        pairs = [[self.equal(one, other) for other in reference.parts] for one in answer.parts]
        return _all(map(_any, [*pairs, *zip(*pairs, strict=True)]))

    def _list_and_value(self, answer: Form, reference: Form) -> Decision:
        """Compare a list with a value: `1,22` may be 1.22; `\\frac12, 50\\%` is one value twice; `4, 4` is no 4."""
        listed, other = (answer, reference) if answer.kind is Kind.LIST else (reference, answer)
        match, value = _DECIMAL_COMMA.fullmatch(listed.text), parse_rational(other.text)
        if match is not None and value is not None and value.decimal:
            return self.expressions(f"{match[1]}.{match[2]}", other.text)
        values = [tokens(part.text) for part in listed.parts if part.kind is not Kind.EQUATION]
        repeated = len(set(values)) < len(values)
        if listed is reference or repeated or len(listed.parts) > _MOST_ELEMENTS:
            return False
        return _all(self.equal(part, reference) for part in answer.parts)

    def _single(self, answer: Form, reference: Form) -> Decision:
        """Compare a set with a value: a set of one element equals the element."""
        one, other = (form.parts[0] if form.kind is Kind.SET else form for form in (answer, reference))
        lone = all(form.kind is not Kind.SET or len(form.parts) == 1 for form in (answer, reference))
        return self.equal(one, other) if lone else self._whole(answer, reference)

    def _one_quantity(self, answer: Form, reference: Form) -> Decision:
        """Compare a quantity with a number: a missing unit is ignored. 50% is 0.5, and 50, but 0.5% is not 0.5."""
        measured = answer if answer.kind is Kind.QUANTITY else reference
        number = measured.parts[0]
        value = parse_rational(number.text)
        share = measured.mark == "percent"
        if not share or value is None or abs(value.value) >= 1:
            decided = self.equal(number, reference) if measured is answer else self.equal(answer, number)
            if decided is not False or not share:
                return decided
        hundredth = rf"({number.text}) \cdot \frac{{1}}{{100}}" if value is None else str(value.value / 100)
        texts = (hundredth, reference.text) if measured is answer else (answer.text, hundredth)
        return self.expressions(*texts)

    def _equations(self, answer: Form, reference: Form) -> Decision:
        """Compare equations, or one with a value: `x = 5` equals `5 = x` and 5; `2x = 10` is not `x = 5`."""
        value, name = (reference.value, reference.mark) if reference.kind is Kind.EQUATION else (reference, "")
        if value is None:
            return self._whole(answer, reference)
        if answer.kind is not Kind.EQUATION:
            return self.equal(answer, value)
        if not name or _same_name(answer.mark, name):
            return self._each_side(answer.parts[1:] if answer.mark else answer.parts, value)
        # xy = 1 may be a product, while x = 5 is not y = 5.
        return False if len(name) == 1 and parse_rational(value.text) else self._whole(answer, reference)

    def _each_side(self, sides: Sequence[Form], reference: Form) -> Decision:
        """Compare each side, one of them evaluated, with a value: `3 + 4 = 7` is 7; `8 = 7` is not, nor `5x = 0` 0."""
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


def _brackets(form: Form) -> str:
    """Return the brackets of elements in order, or a matrix's shape; a column or what has none is in parentheses."""
    in_parentheses = form.kind in (Kind.LIST, Kind.SET, Kind.NAMED) or (
        form.kind is Kind.MATRIX and set(form.mark) <= set("1 ")
    )
    return "()" if in_parentheses else form.mark


def _is_ranking(reference: Form) -> bool:
    """Return whether it lists three or more letters that are a run of the alphabet: C, A, B is not A, B, C."""
    letters = "".join(part.text for part in reference.parts)
    upper = letters.isalpha() and letters.isupper() and len(set(letters)) == len(letters)
    return reference.kind is Kind.LIST and 3 <= len(letters) == len(reference.parts) and upper and is_run(letters)


def _same_ratio(answer: Form, reference: Form) -> bool:
    """Return whether ratios are equal; a reference that could be reduced, such as 3:30, is a time."""
    found, expected = ([int(part.text) for part in form.parts] for form in (answer, reference))
    factor = gcd(*found) if gcd(*expected) == 1 else 1
    return [value // (factor or 1) for value in found] == expected


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


def _any(decisions: Collection[Decision]) -> Decision:
    """Return True if one is True, False if all are False, else None."""
    return True if True in decisions else None if None in decisions else False
