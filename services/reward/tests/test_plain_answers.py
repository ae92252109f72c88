"""Answers decided exactly, without a symbolic library; sympy is the judge of the closed forms here."""

import time
from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_reward.closed_forms import parse_closed_form
from quartet_reward.equality_policy import STRICT, EqualityPolicy
from quartet_reward.plain_answers import decide

# An expression, twice: as LaTeX that is read here, and as sympy's.
Written = tuple[str, sympy.Expr]
LEAVES: tuple[Written, ...] = (
    *((str(n), sympy.Integer(n)) for n in (0, 1, 2, 3, 12)),
    *((name, sympy.Symbol(name, positive=True)) for name in "xy"),
    (r"\pi", sympy.pi),
    *((rf"\sqrt{{{n}}}", sympy.sqrt(n)) for n in (2, 3, 8, 12)),
    (r"\frac{3}{4}", sympy.Rational(3, 4)),
)


def _combined(parts: st.SearchStrategy[Written]) -> st.SearchStrategy[Written]:
    return st.one_of(
        st.tuples(parts, parts).map(lambda two: (f"({two[0][0]}) + ({two[1][0]})", two[0][1] + two[1][1])),
        st.tuples(parts, parts).map(lambda two: (f"({two[0][0]}) - ({two[1][0]})", two[0][1] - two[1][1])),
        st.tuples(parts, parts).map(lambda two: (rf"({two[0][0]}) \cdot ({two[1][0]})", two[0][1] * two[1][1])),
        st.tuples(parts, st.integers(2, 3)).map(lambda two: (f"({two[0][0]})^{two[1]}", two[0][1] ** two[1])),
        parts.map(lambda one: (rf"\frac{{{one[0]}}}{{6}}", one[1] / 6)),
    )


expressions = st.recursive(st.sampled_from(LEAVES), _combined, max_leaves=5)


@settings(max_examples=150, deadline=None)
@given(expressions, expressions)
def test_closed_forms_are_equal_exactly_when_sympy_finds_no_difference(one, two):
    decided = decide(one[0], two[0], STRICT)
    assert decided is None or decided is bool(sympy.expand(one[1] - two[1]) == 0)


@settings(max_examples=100, deadline=None)
@given(expressions)
def test_every_expression_equals_itself_expanded_by_sympy(one):
    if parse_closed_form(one[0]) is not None:
        written = sympy.latex(sympy.expand(one[1]), fold_short_frac=False)
        assert decide(written, one[0], STRICT) in (True, None)


@given(st.fractions(-(10**9), 10**9, max_denominator=999), st.fractions(-(10**9), 10**9, max_denominator=999))
def test_tuples_of_numbers_are_equal_exactly_when_their_elements_are(a, b):
    def written(value: Fraction) -> str:
        return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"

    assert decide(f"({written(a)}, {written(b)})", f"({a}, {b})", STRICT) is True
    assert decide(f"({written(b)}, {written(a)})", f"({a}, {b})", STRICT) is (a == b)
    assert decide(rf"\{{{written(b)}, {written(a)}\}}", rf"\{{{a}, {b}\}}", STRICT) is True


@pytest.mark.parametrize(
    "text",
    [
        *("1/2x", "f(x)", r"2\frac{1}{2}x", "x^10", "i^2", "sin", "or", "5!", "|x|", "x_1", "50%", r"\sin 2x", "1 2 x"),
        *(
            "",
            "(",
            ")",
            "{",
            "+",
            "x+",
            "()",
            r"\frac{1}{0}",
            r"\frac{x}{0}",
            r"\sqrt{-4}",
        ),
        *("x^{99}", "((((9999999^{16})^{16})^{16})^{16})^{16}", "(a+b+c+k+n+r)^{16}", r"\sqrt{999999999}", "(" * 150),
    ],
)
def test_what_could_be_read_in_several_ways_or_costs_much_is_left_alone(text):
    assert parse_closed_form(text) is None


@pytest.mark.parametrize(
    ("reference", "answer"),
    [("x = x", "5"), ("x = x + 1", "5"), ("y", "y = y"), ("1 = 1", "1"), (r"\emptyset", "1"), ("True", "x")],
)
def test_a_reference_that_must_be_refused_is_not_decided_here(reference, answer):
    assert decide(answer, reference, STRICT) is None


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        (r"\cot x", r"\cot{x}", True),
        (r"\cot x", r"\frac{1}{\tan x}", None),
        (r"\frac{1}{x+1}", r"\frac{1}{1+x}", True),
        (r"\frac{1}{x+1}", r"\frac{2}{2x+2}", None),
        (r"\sqrt{x+1}", r"\sqrt{1+x}", True),
        ("5x - 7y + 11z + 4 = 0", "7y - 5x = 11z + 4", True),
        ("5x - 7y + 11z + 4 = 0", "7y - 5x = 11z - 4", None),
        ("x = 5", "5 = x", True),
        ("x = 5", "2x = 10", False),
    ],
)
def test_parts_known_by_their_form_are_equal_or_left_to_the_library(reference, answer, equal):
    assert decide(answer, reference, STRICT) is equal


def test_names_that_do_not_count_and_decimals_are_left_to_the_library():
    assert decide("2x", "2y", STRICT) is False
    assert decide("2x", "2y", EqualityPolicy(any_names=True)) is None
    assert decide("0.333x", r"\frac{x}{3}", STRICT) is None
    assert decide("0.5x", r"\frac{x}{2}", STRICT) is True


def test_parts_in_parts_are_told_apart_at_once():
    def nested(inside: str) -> str:
        return r"\sqrt{1+" * 17 + inside + "}" * 17

    began = time.perf_counter()
    assert decide(nested("x"), nested("x"), STRICT) is True
    assert decide(nested("x"), nested("y"), STRICT) is None
    assert time.perf_counter() - began < 0.1


@given(st.text(alphabet="0123456789.xyiabc+-*/^_(){}[]\\,= piqrtsfcdu", max_size=120))
def test_no_text_takes_long_or_breaks_it(text):
    began = time.perf_counter()
    assert decide(text, text, STRICT) in (True, False, None)
    assert time.perf_counter() - began < 0.5
