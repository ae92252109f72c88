"""Compares two forms part by part, down to numbers and words; subclasses compare other expressions."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from quartet_reward.math.fast import equal_rationals, parse_rational
from quartet_reward.math.forms import Form, Kind
from quartet_reward.math.notation import same_unit, tokens


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


STRICT = EqualityPolicy()


# Longer lists are not compared element by element.
_MOST_ELEMENTS = 64
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d{1,2}|(?<=\b0,)\d{3}|\d{4,})", re.ASCII)
_DECIMAL = re.compile(r"[-+]?\d*(?:\.(\d*))?", re.ASCII)
_SET_COMMAND = re.compile(r"\\(?:mathbb|cup|cap|setminus|R)(?![a-zA-Z])")

Decision = bool | None


class Comparison:
    """Compares numbers and words exactly; a subclass decides the rest.

    Each method returns None where it cannot decide.
    """

    def __init__(self, policy: EqualityPolicy):
        self.policy = policy

    def expressions(self, answer: str, reference: str) -> Decision:
        """Return whether two expressions, equations or relations are equal."""
        found, expected = parse_rational(answer), parse_rational(reference)
        if found is None or expected is None:
            letters = len(answer) == len(reference) == 1 and (answer + reference).isalpha()
            return answer.casefold() == reference.casefold() if letters and not self.policy.any_names else None
        return equal_rationals(found, expected, self.policy.decimal_places)

    def rounds(self, exact: str, rounded: str) -> Decision:
        """Return whether one expression is the other one rounded to its written places."""
        values = parse_rational(exact), parse_rational(rounded)
        if values[0] is None or values[1] is None:
            return None
        return abs(values[0].value - values[1].value) <= max(half_a_place(exact), half_a_place(rounded))

    def equal(self, answer: Form, reference: Form) -> Decision:
        if answer.kind is Kind.EQUATION and _is_tautology(answer):
            return False
        if tokens(answer.text) == tokens(reference.text):
            return True
        decided = self._equal(answer, reference)
        if decided is False and self.policy.any_names:
            return self.expressions(answer.text, reference.text)
        return decided

    def _equal(self, answer: Form, reference: Form) -> Decision:
        if reference.kind is Kind.ROUNDED:
            return self.equal(answer, reference.parts[0])
        if answer.kind is Kind.ROUNDED:
            exact, rounded = answer.parts
            value = exact.parts[-1] if exact.kind is Kind.EQUATION else exact
            rounds = self.policy.chains == "last" or self.rounds(value.text, rounded.text)
            return _all([self.equal(exact, reference), rounds])
        if way := _WAYS.get((answer.kind, reference.kind)):
            return way(self, answer, reference)
        if Kind.EQUATION in (answer.kind, reference.kind):
            return self._one_equation(answer, reference)
        if Kind.QUANTITY in (answer.kind, reference.kind):
            return self._one_quantity(answer, reference)
        return False

    def _whole(self, answer: Form, reference: Form) -> Decision:
        return self.expressions(answer.text, reference.text)

    def _marks(self, answer: Form, reference: Form) -> Decision:
        return answer.mark == reference.mark

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

    def _elements(self, answer: Form, reference: Form) -> Decision:
        """Compare in any order, ignoring repetitions."""
        if answer.mark and reference.mark and answer.mark != reference.mark:
            return False  # values of x, not of y
        if max(len(answer.parts), len(reference.parts)) > _MOST_ELEMENTS:
            return False
        found = [self._any(part, reference.parts, self.equal) for part in answer.parts]
        expected = [
            self._any(part, answer.parts, lambda one, other: self.equal(other, one)) for part in reference.parts
        ]
        return _all([*found, *expected])

    def _decimal_comma(self, answer: Form, reference: Form) -> Decision:
        """Compare a list with a number: `1,22` may be 1.22, while the comma of `1,225` separates thousands."""
        listed, other = (answer, reference) if answer.kind is Kind.LIST else (reference, answer)
        match, value = _DECIMAL_COMMA.fullmatch(listed.text), parse_rational(other.text)
        if match is None or value is None or not value.decimal:
            return False
        return self.expressions(f"{match[1]}.{match[2]}", other.text)

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
        """Compare a quantity with a number: a missing unit is ignored; 50% is 50 and 0.5."""
        one, other = (form.parts[0] if form.kind is Kind.QUANTITY else form for form in (answer, reference))
        number = self.equal(one, other)
        percent = "percent" in (answer.mark, reference.mark) and Kind.VALUE in (answer.kind, reference.kind)
        return self._whole(answer, reference) if percent and not number else number

    def _equations(self, answer: Form, reference: Form) -> Decision:
        """Compare equations: `x = 5` equals `5 = x`, `2x - y = 3` equals `y = 2x - 3`; `2x = 10` is not `x = 5`."""
        value = reference.value
        if value is None:
            return self._whole(answer, reference)
        # W(n) and W(x) name the same function.
        if not reference.mark or answer.mark.partition("(")[0] == reference.mark.partition("(")[0]:
            return self._each_side(answer.parts[1:] if answer.mark else answer.parts, value)
        return False if parse_rational(value.text) else self._whole(answer, reference)

    def _one_equation(self, answer: Form, reference: Form) -> Decision:
        if reference.kind is Kind.EQUATION:
            return self._whole(answer, reference) if reference.value is None else self.equal(answer, reference.value)
        return self._each_side(answer.parts[1:] if answer.mark else answer.parts, reference)

    def _each_side(self, sides: Sequence[Form], reference: Form) -> Decision:
        """Compare each side with a value: `x = 7` and `3 + 4 = 7` give 7; `8 = 7` does not, nor `5x - 7y = 0` 0."""
        return _all(self.equal(side, reference) for side in (sides[-1:] if self.policy.chains == "last" else sides))


_WAYS: dict[tuple[Kind, Kind], Callable[[Comparison, Form, Form], Decision]] = {
    (Kind.VALUE, Kind.VALUE): Comparison._whole,
    (Kind.WORDS, Kind.WORDS): Comparison._marks,
    (Kind.CLOCK, Kind.CLOCK): Comparison._marks,
    (Kind.TUPLE, Kind.TUPLE): Comparison._in_order,
    (Kind.MATRIX, Kind.MATRIX): Comparison._in_order,
    (Kind.LIST, Kind.LIST): Comparison._elements,
    (Kind.SET, Kind.SET): Comparison._elements,
    (Kind.RELATION, Kind.RELATION): Comparison._relations,
    (Kind.EQUATION, Kind.EQUATION): Comparison._equations,
    (Kind.QUANTITY, Kind.QUANTITY): Comparison._quantities,
}
for _one, _other, _way in (
    (Kind.TUPLE, Kind.LIST, Comparison._tuple_and_list),
    (Kind.LIST, Kind.VALUE, Comparison._decimal_comma),
    (Kind.LIST, Kind.SET, Comparison._elements),
    (Kind.SET, Kind.VALUE, Comparison._single),
    (Kind.TUPLE, Kind.VALUE, Comparison._interval_and_value),
    (Kind.MATRIX, Kind.VALUE, Comparison._whole),
    (Kind.RELATION, Kind.TUPLE, Comparison._relations),
    (Kind.RELATION, Kind.VALUE, Comparison._relations),
):
    _WAYS[_one, _other] = _WAYS[_other, _one] = _way


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
