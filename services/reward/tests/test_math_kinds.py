"""Kinds of answers that people judged otherwise than verifiers did: each with answers that are equal and not."""

import pytest

from quartet_reward.math.choices import paired
from quartet_reward.math.compare import STRICT, EqualityPolicy, Unevaluated
from quartet_reward.math.worker import compare, judge_reference

# Kind: (reference, equal answers, different answers).
KINDS = {
    "number words": (
        ("5", ("five", r"\text{five}"), ("5 million", r"5\text{ thousand}", r"\$5\text{ billion}", "5 hundred")),
        ("5000000", ("5 million", r"5\text{ million}"), ("5 billion",)),
        ("36", (r"3\text{ dozen}", "three dozen"), ("3 score",)),
        (r"\frac52", ("two and a half", "2 and a half", r"2\text{ and a half}", "5 halves"), ("two", "half")),
        ("0.5", ("half", "one half"), ()),
        ("-3", ("minus 3", "negative three"), ("three",)),
        (r"3\text{ million}", ("3000000",), ("3", r"3\text{ billion}")),
        ("1200300", ("one million two hundred thousand three hundred",), ("two three",)),
    ),
    "words are no units": (
        ("5", (), ("5 squared", "5 divided by seven", r"5\text{ minus two}", r"5\text{ root two}", r"5\text{ R2}",
                   r"5\text{ or 6}", "5 to 6", r"5\text{ or more}", r"5\text{ factorial}", r"5\text{ less than that}")),
        ("20", ("20 people", "20 apples", r"20\text{ ways}"), (r"20\text{ west}",)),
        ("3 remainder 1", ("3 remainder 1",), ("3", "1")),
        (r"4\text{ cups}", ("4", "4 cups"), (r"4\text{ cups short}",)),
    ),
    "units": (
        (r"3\text{ hours}", ("3 h", "3"), (r"3\text{ light hours}", r"3\text{ hours ago}", r"3\text{ half hours}")),
        (r"8\text{ dollars per hour}", (r"\$8/\text{hour}", "8 dollars per hour"), (r"8\text{ dollars}",)),
        (r"9.8\text{ m/s}^2", (r"9.8\,\mathrm{m/s^2}", "9.8 m/s^2"), (r"9.8\text{ m/s}",)),
        (r"4\text{ cm}^2", (r"4\text{ sq. cm}", "4 square centimeters", "4"), (r"4\text{ cm}^3", r"4\text{ cm}")),
        (r"10\text{ N}", (r"10\text{ newtons}", r"10\,\mathrm{N}", "10 N"), (r"10\text{ V}",)),
        ("4 cups", (r"4\text{ cups of flour}", "4"), (r"4\text{ of }5\text{ cups}",)),
        ("7", ("7 years old", "7 miles away", "7 apples in total"), (r"7\text{ out of }9",)),
        (r"8\text{ apples}", ("8 apples",), (r"8\text{ rotten apples}", r"8\text{ per apple}")),
        (r"5\text{ ft }6\text{ in}", (r"5\text{ feet }6\text{ inches}",), (r"5\text{ feet }7\text{ inches}", "5 ft")),
        (r"\$50", ("50 dollars", "50"), ("50 cents",)),
        ("60 mph", (r"60\text{ miles per hour}",), (r"60\text{ miles}",)),
        ("8", ("8个",), ()),
    ),
    "percent": (
        (r"33\frac{1}{3}\%", (r"\frac13",), ("0.33",)),
        ("0.5", (r"50\%",), (r"0.5\%",)),
        (r"x\%", (r"\frac{x}{100}",), ()),
        ("1", (r"100\%",), ()),
        (r"\frac{1}{2598960}", (), (r"0.00001\%",)),
    ),
    "letters in order": (
        ("HTH", ("HTH",), ("HHT",)),
        ("BAC", (), ("ABC",)),
        (r"\angle BAC", (r"\angle BAC", "∠BAC"), (r"\angle ABC",)),
        ("C, A, B", ("C, A, B",), ("A, B, C",)),
        ("xy", ("xy", r"x \cdot y"), ("yx",)),
        ("2xy", ("2yx", "2xy"), ("2x",)),
        ("Yes", ("YES", r"\text{yes}", "yes."), ("No",)),
        ("AB", (), ("ab",)),
    ),
    "named values": (
        ("4", ("x = 4, x = 4", r"x = 4 \text{ or } x = 4"), ("4, 4", "x = 4, x = 5")),
        ("12", ("The area is $12$ square units.", "Therefore $12$."), ("The area is $12$ of $13$.",)),
        ("x=2, y=3", ("(2,3)", "(x=2, y=3)", "2, 3", "y=3, x=2", r"x=2 \text{ and } y=3"),
         ("3, 2", "x=3, y=2", r"\{2,3\}", "x=2")),
        ("(2,3)", ("x=2, y=3", "y=3, x=2"), ("x=3, y=2",)),
        (r"\text{width}=3, \text{length}=8", ("3, 8",), ("8, 3",)),
    ),
    "spellings": (
        (r"\frac{\pi}{5}", ("pi/5", "π/5"), ("pi/4",)),
        ("x^{2}+1", ("x**2+1", "x²+1", "ｘ²＋１"), ("x*2+1",)),
        ("e^{9}-1", ("-1 + exp(9)",), ()),
        (r"\sqrt[3]{5}", ("∛5", "5^{1/3}"), ("√5",)),
        ("10^{-3}", ("10⁻³", "0.001"), ("10³",)),
        ("0.0015", ("1.5 x 10^{-3}",), ()),
        ("x_1", ("x₁",), ("x₂",)),
        ("3120_{5}", (r"3120_{\text{five}}", r"3120_{\text{base }5}", "3120 base 5"), ("3120_{7}",)),
        ("15:30", (r"3:30\text{ pm}",), ("3:30 am",)),
        ("1:10", ("2:20",), ("1:20",)),
        ("1234567", ("12,34,567", "1'234'567"), ()),
        (r"\frac16", ("0.1(6)", "0.1666..."), ("0.16",)),
        (r"\binom{10}{4}", ("C(10,4)", "{}_{10}C_4", "C_{10}^{4}"), ("P(10,4)",)),
        (r"\log_{10}5", (r"\lg 5",), (r"\ln 5",)),
        (r"\sin 30^\circ", (r"\frac12",), ()),
        ("(2,3]", ("]2,3]",), ("[2,3]",)),
        (r"\langle 1,2,3\rangle", (r"\mathbf{i}+2\mathbf{j}+3\mathbf{k}", "(1,2,3)"), ("(1,3,2)",)),
        ("9" * 5000, ("9" * 5000,), ("9" * 4999 + "8",)),
    ),
    "options": (
        ("B", ("(B) 12", "B. 12", r"\textbf{(B)}\ 12", "b"), ("(C) 12", "A or B")),
        (r"\textbf{(B)}\ 12", ("12", "B", "(B)"), ("13", "C", "(C) 12")),
        ("12", (r"\textbf{(B)}\ 12",), (r"\textbf{(B)}\ 13",)),
    ),
    "phrases": (
        (r"\text{no solution}", (r"\emptyset", "no solutions", "There is no solution"), (r"\text{no}", "There is no")),
        (r"\emptyset", (r"\text{There are no real solutions}",), (r"\text{There is a solution}",)),
        (r"\mathbb{R}", (r"\text{all real numbers}",), (r"\mathbb{Z}",)),
        (r"\text{does not exist}", (r"\text{DNE}",), ()),
        (r"\text{ellipse}", (r"\text{an ellipse}",), (r"\text{circle}",)),
        (r"\text{increasing}", (), (r"\text{not increasing}",)),
        ("True", (r"\text{true}",), ("False",)),
    ),
    "constants and families": (
        ("Ce^{2x}", ("Ae^{2x}",), ("e^{2x}",)),
        ("y=C_1e^x+C_2e^{-x}", ("y=Ae^x+Be^{-x}",), ("y=Ae^x+Ae^{-x}",)),
        (r"\frac{x^3}{3}+C", (r"\frac{x^3}{3}+\text{constant}",), (r"\frac{x^3}{3}+x",)),
        (r"k\pi, k\in\mathbb{Z}", (r"n\pi, n\in\mathbb{Z}",), (r"2n\pi, n\in\mathbb{Z}",)),
        (r"f(x)=x+c", (r"f(x)=x+c \text{ for any } c\in\mathbb{R}", "y=x+c"), ("f(x)=x",)),
    ),
    "positive variables": (
        (r"\frac{1}{\sqrt{k}}", (r"\sqrt{\frac{1}{k}}",), (r"\sqrt{k}",)),
        (r"\ln(ab)", (r"\ln a+\ln b",), (r"\ln a \ln b",)),
        ("|x|", (), ("x",)),
    ),
    "cheats": (
        (r"\emptyset", (), ("x", "A")),
        ("8", (), ("7e^{0}", "7(1)")),
        ("x+2^{-98}", (), ("x+2^{-99}",)),
        ("x^2+y^2=1", ("2x^2+2y^2=2",), ("(x^2+y^2-1)^2=0",)),
        ("xy=1", (r"y=\frac1x",), ("y=x",)),
    ),
}  # fmt: skip


def same(answer: str, reference: str) -> bool:
    answer, reference = paired(answer, reference)
    return compare(reference, answer, STRICT)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_a_kind_are_equal_where_people_hold_them_equal(kind):
    wrong = []
    for reference, equal, different in KINDS[kind]:
        judge_reference(reference, STRICT)
        wrong += [f"{answer} is {reference}" for answer in equal if not same(answer, reference)]
        wrong += [f"{answer} is not {reference}" for answer in different if same(answer, reference)]
    assert not wrong


UNEVALUATED = (
    ("4", "1+1+1+1"), ("391", "17*23"), ("391", r"17 \cdot 23"), ("391", "17(23)"), ("40320", "8!"), ("42", "84/2"),
    ("42", r"\frac{84}{2}"), ("10", r"\sum_{k=1}^{4} k"), ("2", r"\int_0^2 x dx"), ("24", r"\prod_{k=1}^{4} k"),
    ("4", r"\lim_{x\to 0} \frac{\sin 4x}{x}"), ("-2", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"), ("4", r"\log_2 16"),
    ("4", r"\sqrt{16}"), ("1024", "2^{10}"), ("210", r"\binom{10}{4}"), ("210", "C(10,4)"), ("6", r"\gcd(12,18)"),
    ("3", "|-3|"), ("5", r"\lfloor 5.5 \rfloor"), (r"\frac12", r"\sin 30^\circ"), ("1", "e^{0}"), ("5", "10-5"),
    ("2", r"\frac{d}{dx} 2x"), (r"3\sqrt{2}", r"\sqrt{8}+\sqrt{2}"), (r"6\sqrt{2}", r"2\cdot 3\sqrt{2}"),
    (r"\sqrt{3}", r"\tan 60^\circ"), ("(2,3)", "(1+1,3)"), ("x=4", "x=2+2"), ("0.25", "2^{-2}"),
)  # fmt: skip
EVALUATED = (
    ("4", "2+2=4"), ("4", "4.0"), (r"\frac52", r"\frac{10}{4}"), ("2.5", "5/2"), ("0.5", r"\frac12"), ("4", "x = 4"),
    ("1000000", "10^6"), ("602000", r"6.02 \times 10^5"), (r"3\sqrt{2}", r"\sqrt{18}"), ("2^{10}", "1024"),
    (r"\frac{1+\sqrt5}{2}", r"\frac12+\frac{\sqrt5}{2}"), ("e^2", r"e \cdot e"), (r"5\times 3", "15"), ("8!", "40320"),
    (r"\frac{\pi}{4}", r"\frac{3\pi}{12}"), (r"\ln 2", r"\frac12 \ln 4"), (r"\sqrt3", r"\frac{3}{\sqrt3}"),
    ("9" * 300, "10^{300}-1"), (r"\cos 40^\circ", r"\sin 50^\circ"), ("2x", "x+x"), ("1.41421356", r"\sqrt2"),
)  # fmt: skip


@pytest.mark.parametrize(("reference", "answer"), UNEVALUATED)
def test_a_computation_is_no_answer_where_the_reference_is_a_number(reference, answer):
    with pytest.raises(Unevaluated):
        compare(reference, answer, STRICT)
    assert compare(reference, answer, EqualityPolicy(unevaluated=True))


@pytest.mark.parametrize(("reference", "answer"), EVALUATED)
def test_an_answer_as_evaluated_as_the_reference_is_right(reference, answer):
    assert compare(reference, answer, STRICT)
