"""Symbolic equality of two answers: guards around math-verify. Runs in a worker process only: it may hang.

The guards decide what math-verify decides wrong: right-hand sides taken for the whole (`8=7` for 7), tautologies,
brackets that differ in kind, units that differ, numbers that differ by less than its rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.logic.boolalg import BooleanAtom

from quartet_reward.notation import (
    bracketed_list,
    formula_in_prose,
    is_name,
    known_unit,
    sides_of_equation,
    split_outside_brackets,
    with_decimal_point,
    without_decoration,
)
from quartet_reward.rationals import equal_rationals, parse_rational

_EXTRACTION = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all", equations=False
        ),
    )
]
# Time and memory are the service's to limit, by killing this process: math-verify's own alarms cannot stop what hangs.
_NO_ALARM = None
_COMMA = frozenset([","])
# Two numbers math-verify calls equal, one of them rounded, must agree to this part of their size.
_ROUNDING = 1e-5
_EXACT = 1e-12
# What sympy raises for expressions it cannot handle.
_SYMPY_ERRORS = (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError)


class BadReference(Exception):
    """The reference cannot be compared with; the text says why."""


@dataclass(frozen=True)
class Comparison:
    """Whether an answer equals the reference, and how that was found."""

    equal: bool
    reason: str
    by_text: bool = False


def compare(reference: str, answer: str, reference_was_read: Callable[[], None] = lambda: None) -> Comparison:
    """Compare an answer with the reference.

    Args:
        reference: the reference answer, LaTeX or plain; not empty.
        answer: the completion's answer.
        reference_was_read: called when all that remains to be done is about the answer.

    Raises:
        BadReference: the reference is not mathematics, or is true (or false) of everything.
    """
    reference, answer = (without_decoration(formula_in_prose(text)) for text in (reference, answer))
    gold = _parse(reference)
    is_text = not any(isinstance(value, (sympy.Basic, sympy.MatrixBase)) for value in gold)
    _check_reference(reference, gold, is_text)
    for value in gold:
        if isinstance(value, sympy.Basic):
            _evaluated(value)  # a reference that takes for ever does so here, before the answer can be blamed
    reference_was_read()
    if " ".join(answer.split()) == " ".join(reference.split()):
        return Comparison(True, f"'{_short(answer)}' is the reference, character by character", by_text=is_text)
    if is_text:
        return Comparison(False, f"'{_short(answer)}' is not the text '{_short(reference)}'")
    try:
        return _compare(reference, answer)
    except RecursionError:
        return Comparison(False, f"'{_short(answer)}' is nested too deeply to be read")


def _check_reference(reference: str, gold: list, is_text: bool) -> None:
    if is_text and (not gold or "\\" in reference or reference.count("{") != reference.count("}")):
        raise BadReference(f"'{_short(reference)}' cannot be read as mathematics")
    if reference.casefold() in ("true", "false"):
        raise BadReference(f"'{reference}' is no value; for questions of true or false use the verifier 'exact'")
    if gold and isinstance(gold[0], BooleanAtom):
        raise BadReference(f"'{_short(reference)}' is {gold[0]} of everything: nothing can be compared with it")
    if gold and _is_vacuous(gold[0]):
        raise BadReference(f"'{_short(reference)}' is true (or false) of everything: nothing can be compared with it")
    if gold and (gold[0] in (sympy.nan, sympy.zoo) or isinstance(gold[0], type(sympy.S.EmptySet))):
        raise BadReference(f"'{_short(reference)}' reads as {gold[0]}, which is no value to compare with")


def _compare(reference: str, answer: str) -> Comparison:
    plain_reference, plain_answer = parse_rational(reference), parse_rational(answer)
    if plain_reference is None and plain_answer is not None and plain_answer.decimal:
        plain_reference = parse_rational(with_decimal_point(reference) or "")
    elif plain_answer is None and plain_reference is not None and plain_reference.decimal:
        plain_answer = parse_rational(with_decimal_point(answer) or "")
    if plain_reference is not None and plain_answer is not None:
        decided = equal_rationals(plain_answer, plain_reference)
        if decided is not None:
            return Comparison(decided, f"{_short(answer)} {'=' if decided else '≠'} {_short(reference)}, exactly")

    if plain_reference is not None and plain_answer is None and len(split_outside_brackets(answer, _COMMA)) > 1:
        return Comparison(False, f"{_short(answer)} is a list, not the number {_short(reference)}")

    sides = sides_of_equation(answer)
    if len(sides) > 1 and len(sides_of_equation(reference)) == 1 and "=" not in reference:
        return _compare_sides(reference, sides)

    reference_list, answer_list = bracketed_list(reference), bracketed_list(answer)
    if reference_list and answer_list:
        if reference_list[0] != answer_list[0]:
            return Comparison(False, f"{_short(answer)} is bracketed otherwise than {_short(reference)}")
        if r"\{" not in reference_list[0] and len(reference_list[1]) == len(answer_list[1]):
            return _compare_in_order(reference_list[1], answer_list[1])

    reference_unit, answer_unit = known_unit(reference), known_unit(answer)
    if reference_unit and answer_unit and reference_unit != answer_unit:
        return Comparison(False, f"the unit is {answer_unit}, not {reference_unit}")

    return _compare_symbolically(reference, answer)


def _compare_sides(reference: str, sides: list[str]) -> Comparison:
    """`x = 7` and `3 + 4 = 7` say 7; `8 = 7` does not, and `5x - 7y = 0` does not say 0."""
    values = sides[1:] if is_name(sides[0]) else sides
    for side in values:
        if not side or not _compare(reference, side).equal:
            return Comparison(False, f"a side of the equation, '{_short(side)}', is not {_short(reference)}")
    return Comparison(True, f"each side of the equation is {_short(reference)}")


def _compare_in_order(references: list[str], answers: list[str]) -> Comparison:
    for position, (reference, answer) in enumerate(zip(references, answers, strict=True), start=1):
        if not reference or not answer or not _compare(reference, answer).equal:
            return Comparison(False, f"element {position} is {_short(answer)}, not {_short(reference)}")
    return Comparison(True, "equal element by element")


def _compare_symbolically(reference: str, answer: str) -> Comparison:
    gold, found = _parse(reference), _parse(answer)
    if not any(isinstance(value, (sympy.Basic, sympy.MatrixBase)) for value in found):
        return Comparison(False, f"'{_short(answer)}' cannot be read as mathematics")
    if isinstance(found[0], BooleanAtom) or _is_vacuous(found[0]):
        return Comparison(False, f"'{_short(answer)}' is a tautology or a contradiction, not a value")
    if not verify(gold, found, allow_set_relation_comp=True, timeout_seconds=_NO_ALARM):
        return Comparison(False, f"math-verify finds {_short(answer)} ≠ {_short(reference)}")
    if "%" not in reference + answer and _apart(gold[0], found[0]):
        return Comparison(False, f"{_short(answer)} is near {_short(reference)} but not equal")
    return Comparison(True, f"math-verify finds {_short(answer)} = {_short(reference)}")


def _parse(text: str) -> list:
    return parse(text if r"\boxed" in text else rf"\boxed{{{text}}}", _EXTRACTION, parsing_timeout=_NO_ALARM)


def _is_vacuous(expression: object) -> bool:
    """Return True for an equation that holds, or fails, whatever its variables are, such as x = x or 1 = 2."""
    if not isinstance(expression, sympy.Eq):
        return False
    try:
        return bool(sympy.simplify(expression.lhs - expression.rhs).is_number)
    except _SYMPY_ERRORS:
        return False  # what sympy cannot subtract, math-verify compares side by side


def _evaluated(value: sympy.Basic) -> sympy.Basic:
    try:
        return value.doit()
    except _SYMPY_ERRORS:
        return value


def _apart(gold: object, found: object) -> bool:
    """Return True for two numbers that math-verify holds equal although they differ beyond rounding."""
    if not all(isinstance(value, sympy.Expr) and value.is_number for value in (gold, found)):
        return False
    try:
        return _differ(gold.doit(), found.doit())
    except _SYMPY_ERRORS:
        return False  # math-verify's word stands where they have no numeric value


def _differ(gold: sympy.Expr, found: sympy.Expr) -> bool:
    if gold.is_Rational and found.is_Rational:
        return gold != found
    tolerance = _ROUNDING if gold.has(sympy.Float) or found.has(sympy.Float) else _EXACT
    distance, scale = abs((gold - found).evalf(30)), max(abs(gold.evalf(30)), abs(found.evalf(30)))
    return bool(distance > tolerance * scale)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
