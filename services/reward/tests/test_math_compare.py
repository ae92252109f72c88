"""Answers are compared part by part, at once where they are plain; what math-verify decides wrong is decided right."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quartet_reward.errors import BadReference
from quartet_reward.math.compare import STRICT, Comparison, EqualityPolicy
from quartet_reward.math.forms import read
from quartet_reward.math.worker import compare, judge_reference

MATRIX_EQUATION = (
    r"\begin{pmatrix}x\\y\end{pmatrix} = \begin{pmatrix}1\\2\end{pmatrix} + t \begin{pmatrix}3\\4\end{pmatrix}"
)
# A reference, answers that are equal to it, and answers that are not.
ANSWERS = (
    ("7", ("x = 7", "3+4=7", "x = 3+4 = 7", "f(x) = 7"),
     ("8=7", "7=7=8", "[7,7]", r"7 \approx 8", r"[7,7] \cup [7,7]", "7...8", "7 < 8", r"7 \sim 8",
      r"7 \text{ (or 8)}", r"7 \text{ not eight}", r"7 \to 8", r"\begin{cases} 7 \\ 8 \end{cases}")),
    ("x=4", ("4",), ("y=4",)),
    (r"\{1,2\}", (r"\{2,1\}", "{2,1}", r"\{1,2,2\}"), ("(1,2)",)),
    ("(1,2)", (r"\left(1,2\right)", "1,2"), (r"\{1,2\}", "(2,1)", "{1,2}", "2,1")),
    ("1,2", ("2,1",), ("(2,1)",)),
    (r"5\text{ km}", (r"5\text{ kilometers}",), (r"5\text{ m}",)),
    ("5", (r"5\text{ km}", r"5 \approx 5.0001", r"m_{\max}=5"), ()),
    (r"\frac12", ("½",), (r"\frac12 \approx 0.6",)),
    (r"\sqrt{2}", ("1.41421356",), ("1.4142",)),
    (r"\frac{\sqrt{3}}{2}", (r"\sqrt{3}/2",), ()),
    ("x^2+2x+1", ("(x+1)^2",), ()),
    ("x<3", ("3>x",), ("x<4",)),
    (r"(-\infty,3)", ("x<3",), (r"(-\infty,3]",)),
    (r"50\%", ("0.5",), ()),
    (r"\text{(C)}", ("C", r"\text{C}"), (r"\text{(D)}",)),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", (r"\begin{pmatrix}1\\2\end{pmatrix}",),
     (r"\begin{pmatrix}2\\1\end{pmatrix}",)),
    ("x = 11", ("x = 5 + 6 = 11",), ("x = 5 + 5 + 1 = 7 = 11",)),
    ("z = 1 + 1 = 2", ("z = 2",), ("z = 3 + 3 = 2",)),
    (r"x = \frac12, x = 1 \pm \sqrt{3}", (r"x = 1 + \sqrt3, x = 1 - \sqrt3, x = 0.5",), ()),
    (r"1 - \frac{1}{\mathrm{e}}", (r"1 - \frac1e",), (r"1 + \frac{1}{\mathrm{e}}",)),
    ("8", ("{{8}}", "８", "8\u200b"), ("x = 8 or x = 9", r"7 \text{ or } 8")),
    (r"x = \pm 5", (r"x = 5 \text{ or } x = -5",), ("x = 5",)),
    ("4", (r"\text{The answer is }4",), ("4, 4", r"\infty", "\x00", "{" * 400 + "}" * 400)),
    (r"3\sqrt{13}", (r"\sqrt{117}",), (r"\sqrt{116}",)),
    ("52_8", ("52_{8}",), ("52_9",)),
    (r"(0,9) \cup (9,36)", (r"(0, 9)\cup(9, 36)",), ()),
    (r"\pi", (r"\pi \approx 3.14",), ("3.14",)),
    ("72 mph", (r"72\text{ miles per hour}",), ("72 kg",)),
    ("8 red apples", ("8 apples",), ("8 pears",)),
    (r"\$72", ("72 dollars",), ("72 kg",)),
    (r"\begin{cases} x = 1 \\ y = 2 \end{cases}", ("x=1, y=2",), ()),
    (r"\frac{NO}{BO}=\frac{1}{\sqrt{6}}", (r"\frac{1}{\sqrt{6}}",), ()),
    ("0<f(x)<1", ("(0,1)",), ()),
    ("0", (), ("5x-7y+11z+4=0", r"\emptyset")),
    (r"\frac{1}{2^{99}}", (), (r"\frac{1}{2^{98}}",)),
    ("0.0000001", (), ("0.0000002",)),
    ("89", (), ("8\u200d8",)),
    (r"\frac{1}{2004!}", (), (r"\frac{1}{2006!}",)),
    ("10:30 pm", (), ("10:30 am",)),
    ("3", (), ("3 t", r"\pi = 3")),
    (MATRIX_EQUATION, (), ("1", MATRIX_EQUATION.replace("3", "5"))),
    (r"\frac{1\pm\sqrt5}{2}", (), (r"\frac{1+\sqrt5}{2}",)),
    ("x<-1 or x>1", (), ("(-1,1)", "y<-1 or y>1")),
    (r"x\ne\pm5", (), (r"x\ne5",)),
    (r"\frac{25}{13}", (), (r"\frac{25}{13} = 1\frac{11}{13}",)),
)  # fmt: skip
# Each is an answer to the other.
SAME = (
    (r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}"),
    (r"\{1\pm\sqrt5, -2\}", r"\{-2, 1-\sqrt{5}, 1+\sqrt{5}\}"),
    (r"\{x|-2\le x<1\}", "[-2,1)"),
    (r"\log_2(32)=5", "5"),
    (r"x\ne\pm5", r"x\neq 5, x\neq -5"),
    (r"x\ne\pm5", r"\mathbb{R}\setminus\{5,-5\}"),
    (r"(-\infty,-1)\cup(1,\infty)", "x<-1 or x>1"),
    (r"(-\infty,3)", r"(-\infty,1) \cup [1,3)"),
    (r"\emptyset", r"\varnothing"),
    (r"\frac{25}{13}", r"\frac{25}{13} = 1\frac{12}{13}"),
)


EVERY = [
    *((reference, answer, True) for reference, equal, _ in ANSWERS for answer in equal),
    *((*pair, True) for both in SAME for pair in (both, both[::-1])),
    *((reference, answer, False) for reference, _, different in ANSWERS for answer in different),
]


@pytest.mark.parametrize(("reference", "answer", "equal"), EVERY)
def test_an_answer_is_the_reference_or_not(reference, answer, equal):
    assert judge_reference(reference, STRICT)
    assert compare(reference, answer, STRICT) is equal
    without_a_library = Comparison(STRICT).equal(read(answer), read(reference))
    assert without_a_library is None or without_a_library is equal


@pytest.mark.parametrize(
    ("reference", "answer", "policy"),
    [
        ("x = 11", "x = 5 + 5 + 1 = 7 = 11", EqualityPolicy(chains="last")),
        ("1/3", r"1/3 \approx 1.3", EqualityPolicy(chains="last")),
        ("(1,3)", "{1,3}", EqualityPolicy(bare_braces="group")),
        ("f(x)", "f(y)", EqualityPolicy(any_names=True)),
        (r"\frac13", "0.33", EqualityPolicy(decimal_places=2)),
    ],
)
def test_a_policy_accepts_what_the_default_refuses(reference, answer, policy):
    assert compare(reference, answer, policy)
    assert not compare(reference, answer, STRICT)


def test_relations_answer_sets_unless_the_policy_says_otherwise():
    reference, answer = r"x \in [-2,7]", r"-2 \le x \le 7"
    assert compare(reference, answer, STRICT)
    assert not compare(reference, answer, EqualityPolicy(relations_as_sets=False))
    assert compare(answer, r"[-2,7]", EqualityPolicy(relations_as_sets=False))


@pytest.mark.parametrize(
    "reference", ["x=x", "1=1", "1=2", r"\frac{1}{", r"\notacommand{", r"\frac{1}{0}", "(1, 1=1)", "x=x+1"]
)
def test_a_reference_that_cannot_be_compared_with_is_refused(reference):
    with pytest.raises(BadReference):
        judge_reference(reference, STRICT)
    assert not read(reference).is_plain  # so that it is judged


def decide(answer: str, reference: str, policy: EqualityPolicy = STRICT) -> bool | None:
    return Comparison(policy).equal(read(answer), read(reference))


@settings(deadline=None)
@given(st.fractions(-(10**9), 10**9, max_denominator=999), st.fractions(-(10**9), 10**9, max_denominator=999))
def test_tuples_of_numbers_are_equal_exactly_when_their_elements_are(a, b):
    def written(value: Fraction) -> str:
        return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"

    assert decide(f"({written(a)}, {written(b)})", f"({a}, {b})") is True
    assert decide(f"({written(b)}, {written(a)})", f"({a}, {b})") is (a == b)
    assert decide(rf"\{{{written(b)}, {written(a)}\}}", rf"\{{{a}, {b}\}}") is True


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        (r"\cot x", r"\cot{x}", None),
        (r"\cot x", r"\cot  x", True),
        ("x = 5", "2x = 10", False),
        (r"(1, \sqrt{x})", r"(2, \sqrt{x})", False),
        (r"(1, \sqrt{4})", "(1, 2)", None),
        (r"\frac{1\pm 3}{2}", r"\frac{1 + 3}{2}, \frac{1 - 3}{2}", True),
        (r"\pm 1 \pm 2", r"1+2, 1-2, -1+2, -1-2", None),
        ("10 km", "10 mi", False),
        (r"\text{A, C, D}", r"\text{D, C, A}", True),
    ],
)
def test_what_is_written_alike_is_equal_and_the_rest_is_left_to_the_library(reference, answer, equal):
    assert decide(answer, reference) is equal


@settings(deadline=None)
@given(st.text(alphabet="0123456789.xyiabc+-*/^_(){}[]\\,= piqrtsfcdu|<>:$", max_size=400))
@example("\\frac" * 300)
@example("{" * 3000)
def test_math_comparison_survives_any_text(text):
    assert decide(text, text) in (True, False)


@pytest.mark.parametrize("piece", ["(", "1,", r"\pm ", r"\begin{cases}"])
def test_no_repetition_takes_long(piece):
    text = (piece * 400)[:400]
    assert decide(text, text + "1") in (True, False, None)
