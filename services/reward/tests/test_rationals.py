"""Plain numbers are decided exactly or not at all."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_reward.math.fast import Rational, equal_rationals, parse_rational

WRITTEN = {
    5: ["$5", "$5$", r"\(5\)", "  5\n"],
    -8: ["- 8", "\u22128"],
    Fraction(1, 2): ["0.5", ".5", "1/2", r"\frac{1}{2}", r"\frac12", "½"],
    Fraction(5, 2): ["2½", "2 1/2"],
    Fraction(-5, 2): [r"-2\frac{1}{2}"],
    1000: ["1,000", r"1\,000", "1{,}000"],
    1_000_000: ["1 000 000"],
    600: [r"6 \cdot 10^2"],
    Fraction(602, 10**5): ["6.02E-3"],
}


@pytest.mark.parametrize(("value", "text"), [(value, text) for value, texts in WRITTEN.items() for text in texts])
def test_written_numbers_are_read(value, text):
    assert parse_rational(text).value == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "-", ".", "x", "5x", "5 km", "5%", r"5\%", r"90^\circ", "1,22", "12,34", "1,00", "1,000,00", "1 00"),
        *("1/0", r"\frac{1}{0}", "--3", "1.2.3", "0x10", "1_000", "٣", "10^23", "2 7/3", "½/2", "1/2/3", "(5)", "5!"),
        *("1e999999999", r"10^{99999}", "1e9999", "9" * 300, "3=3", "1+1", "\x00", "5 5"),
    ],
)
def test_what_is_not_plainly_a_number_is_left_alone(text):
    assert parse_rational(text) is None


@settings(deadline=None)
@given(st.fractions(max_denominator=10**9))
def test_every_fraction_is_read_back_in_every_way_of_writing_it(value):
    sign, numerator, denominator = "-" if value < 0 else "", abs(value.numerator), value.denominator
    for text in (f"{sign}{numerator}/{denominator}", rf"{sign}\frac{{{numerator}}}{{{denominator}}}"):
        assert parse_rational(text) == Rational(value, decimal=False)
    if numerator % denominator:
        whole, rest = divmod(numerator, denominator)
        assert parse_rational(rf"{sign}{whole}\frac{{{rest}}}{{{denominator}}}").value == value


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(1, 9))
def test_every_decimal_is_read_back_in_every_way_of_writing_it(digits, places):
    sign, body = "-" if digits < 0 else "", str(abs(digits)).rjust(places + 1, "0")
    whole, fraction = int(body[:-places]), body[-places:]
    for written in (
        f"{sign}{whole}.{fraction}",
        f"{sign}{whole:,}.{fraction}",
        f"{sign}{whole:,}.{fraction}".replace(",", " "),
        f"{digits}e-{places}",
    ):
        assert parse_rational(written).value == Fraction(digits, 10**places)


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("0.5", "1/2", True),
        ("0.33", "1/3", False),
        ("0.3333333", "1/3", None),
        ("1000000000000000000000001", "1000000000000000000000000", False),
    ],
)
def test_numbers_are_compared_and_rounded_ones_left_to_math_verify(answer, reference, equal):
    assert equal_rationals(parse_rational(answer), parse_rational(reference)) is equal
