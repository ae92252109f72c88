"""Symbolic equality of two answers: guards around math-verify. Runs in a worker process only: it may hang.

The guards decide what math-verify decides wrong: right-hand sides taken for the whole (`8=7` for 7), tautologies,
brackets that differ in kind, units that differ, numbers that differ by less than its rounding.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.logic.boolalg import BooleanAtom

from quartet_reward.equality_policy import STRICT, EqualityPolicy
from quartet_reward.notation import (
    bracketed_list,
    formula_in_prose,
    is_name,
    known_unit,
    quantity_of,
    sides_of_equation,
    solutions,
    split_outside_brackets,
    value_of,
    value_of_chain,
    with_braces,
    with_decimal_point,
    without_approximation,
    without_decoration,
    without_group,
)
from quartet_reward.plain_answers import decide
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
# Math-verify's own reading of whole completions, for those who compare with its figures.
_UNGUARDED = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_FIGURES = re.compile(r"[-+\d.,\s]+")
# Time and memory are the service's to limit, by killing this process: math-verify's own alarms cannot stop what hangs.
_NO_ALARM = None
_COMMA = frozenset([","])
# Two numbers math-verify calls equal must agree to this part of their size, unless one of them is rounded.
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


def compare(
    reference: str,
    answer: str,
    reference_was_read: Callable[[], None] = lambda: None,
    policy: EqualityPolicy = STRICT,
) -> Comparison:
    """Compare an answer with the reference.

    Args:
        reference: the reference answer, LaTeX or plain; not empty.
        answer: the completion's answer.
        reference_was_read: called when all that remains to be done is about the answer.
        policy: what counts as equal where people differ.

    Raises:
        BadReference: the reference is not mathematics, or is true (or false) of everything.
    """
    if not policy.guards:
        return _compare_unguarded(reference, answer, reference_was_read, policy)
    reference, answer = (
        with_braces(without_decoration(formula_in_prose(text)), policy.bare_braces == "set")
        for text in (reference, answer)
    )
    expected, found = solutions(reference), solutions(answer)
    if expected and found and expected[0] != found[0] and not policy.any_names:
        reference_was_read()
        return Comparison(False, f"these are values of {found[0]}, not of {expected[0]}")
    if found and (expected or "=" not in reference):
        answer = found[1]
    if expected:
        reference = expected[1]
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
        return _compare(value_of_chain(reference), answer, policy)
    except RecursionError:
        return Comparison(False, f"'{_short(answer)}' is nested too deeply to be read")


def warm_up() -> None:
    """Make a first comparison of each kind, which builds the parser's tables: no answer's deadline pays for that."""
    for reference, answer in (
        (r"x^2 + \sin x", r"\sin(x) + x^2 + y"),
        (r"(1, \sqrt{x})", "(1, y!)"),
        ("x < 3", "4 > x"),
    ):
        compare(reference, answer)


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


def _compare(reference: str, answer: str, policy: EqualityPolicy) -> Comparison:
    answer = without_approximation(answer)
    plain_reference, plain_answer = parse_rational(reference), parse_rational(answer)
    if plain_reference is None and plain_answer is not None and plain_answer.decimal:
        plain_reference = parse_rational(with_decimal_point(reference) or "")
    elif plain_answer is None and plain_reference is not None and plain_reference.decimal:
        plain_answer = parse_rational(with_decimal_point(answer) or "")
    if plain_reference is not None and plain_answer is not None:
        decided = equal_rationals(plain_answer, plain_reference, policy.decimal_places)
    else:
        decided = decide(answer, reference, policy)
    if decided is not None:
        return Comparison(decided, f"{_short(answer)} {'=' if decided else '≠'} {_short(reference)}, exactly")

    if plain_reference is not None and plain_answer is None and (quantity := quantity_of(answer)):
        return _compare(reference, quantity[0], policy)  # a unit that the reference does not ask for is forgiven

    if plain_reference is not None and plain_answer is None and len(split_outside_brackets(answer, _COMMA)) > 1:
        return Comparison(False, f"{_short(answer)} is a list, not the number {_short(reference)}")

    sides = sides_of_equation(answer)
    if len(sides) > 1 and (value := value_of(reference, sides[0])) is not None:
        return _compare_sides(value, sides[-1:] if policy.chains == "last" else sides, policy)

    if (ordered := _elements(reference, answer)) is not None:
        return ordered if isinstance(ordered, Comparison) else _compare_in_order(*ordered, policy)

    reference_unit, answer_unit = known_unit(reference), known_unit(answer)
    if reference_unit and answer_unit and reference_unit != answer_unit:
        return Comparison(False, f"the unit is {answer_unit}, not {reference_unit}")

    return _compare_symbolically(reference, answer, policy)


def _compare_sides(reference: str, sides: list[str], policy: EqualityPolicy) -> Comparison:
    """`x = 7` and `3 + 4 = 7` say 7; `8 = 7` does not, and `5x - 7y = 0` does not say 0."""
    if len(sides) > 1 and is_name(sides[0]) and sides[0] in sides[1:]:
        return Comparison(False, f"{_short(sides[0])} = {_short(sides[0])} says nothing")
    values = sides[1:] if len(sides) > 1 and is_name(sides[0]) else sides
    for side in values:
        if not side or not _compare(reference, side, policy).equal:
            return Comparison(False, f"a side of the equation, '{_short(side)}', is not {_short(reference)}")
    return Comparison(True, f"each side of the equation is {_short(reference)}")


def _elements(reference: str, answer: str) -> Comparison | tuple[list[str], list[str]] | None:
    """Return the elements of both where they must agree one by one, or the verdict on brackets that differ."""
    reference_list, answer_list = bracketed_list(reference), bracketed_list(answer)
    if reference_list and answer_list:
        if reference_list[0] != answer_list[0]:
            return Comparison(False, f"{_short(answer)} is bracketed otherwise than {_short(reference)}")
        if r"\{" not in reference_list[0] and len(reference_list[1]) == len(answer_list[1]):
            return reference_list[1], answer_list[1]
    elif reference_list and reference_list[0] == "()":
        bare = split_outside_brackets(without_group(answer), _COMMA)
        if len(bare) == len(reference_list[1]):
            return reference_list[1], bare
    elif answer_list and answer_list[0] == "()":
        bare = split_outside_brackets(without_group(reference), _COMMA)
        if len(bare) == len(answer_list[1]):
            return bare, answer_list[1]
    return None


def _compare_in_order(references: list[str], answers: list[str], policy: EqualityPolicy) -> Comparison:
    for position, (reference, answer) in enumerate(zip(references, answers, strict=True), start=1):
        if not reference or not answer or not _compare(reference, answer, policy).equal:
            return Comparison(False, f"element {position} is {_short(answer)}, not {_short(reference)}")
    return Comparison(True, "equal element by element")


def _compare_symbolically(reference: str, answer: str, policy: EqualityPolicy) -> Comparison:
    gold, found = _parse(reference), _parse(answer)
    if not any(isinstance(value, (sympy.Basic, sympy.MatrixBase)) for value in found):
        return Comparison(False, f"'{_short(answer)}' cannot be read as mathematics")
    if isinstance(found[0], BooleanAtom) or _is_vacuous(found[0]):
        return Comparison(False, f"'{_short(answer)}' is a tautology or a contradiction, not a value")
    if not _verify(gold, found, policy):
        return Comparison(False, f"math-verify finds {_short(answer)} ≠ {_short(reference)}")
    if "%" not in reference + answer and _apart(gold[0], found[0], policy):
        return Comparison(False, f"{_short(answer)} is near {_short(reference)} but not equal")
    return Comparison(True, f"math-verify finds {_short(answer)} = {_short(reference)}")


def _compare_unguarded(
    reference: str, completion: str, reference_was_read: Callable[[], None], policy: EqualityPolicy
) -> Comparison:
    targets = _UNGUARDED[:1] if policy.formulas_only else _UNGUARDED
    if not _DELIMITED.search(reference) and not _FIGURES.fullmatch(reference):
        reference = f"${reference}$"  # as those do who call math-verify with a bare reference
    gold = parse(reference, targets, parsing_timeout=_NO_ALARM)
    if not gold:
        raise BadReference(f"math-verify finds no answer in '{_short(reference)}'")
    reference_was_read()
    found = parse(completion, targets, parsing_timeout=_NO_ALARM)
    equal = bool(found) and _verify(gold, found, policy)
    return Comparison(equal, "equal for math-verify alone" if equal else "not equal for math-verify alone")


def _verify(gold: list, found: list, policy: EqualityPolicy) -> bool:
    return verify(
        gold,
        found,
        float_rounding=policy.decimal_places,
        strict=not policy.any_names,
        allow_set_relation_comp=policy.relations_as_sets,
        timeout_seconds=_NO_ALARM,
    )


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


def _apart(gold: object, found: object, policy: EqualityPolicy) -> bool:
    """Return True for two numbers that math-verify holds equal although they differ beyond rounding."""
    if not (isinstance(gold, sympy.Expr) and isinstance(found, sympy.Expr) and gold.is_number and found.is_number):
        return False
    try:
        return _differ(gold.doit(), found.doit(), policy)
    except _SYMPY_ERRORS:
        return False  # math-verify's word stands where they have no numeric value


def _differ(gold: sympy.Expr, found: sympy.Expr, policy: EqualityPolicy) -> bool:
    if gold.is_Rational and found.is_Rational:
        return gold != found
    tolerance = 10.0 ** (1 - policy.decimal_places) if gold.has(sympy.Float) or found.has(sympy.Float) else _EXACT
    distance, scale = abs((gold - found).evalf(30)), max(abs(gold.evalf(30)), abs(found.evalf(30)))
    return bool(distance > tolerance * scale)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
