"""The guards around math-verify: what it decides wrong is decided right."""

import pytest

from quartet_reward.math_compare import BadReference, compare


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("7", "x = 7"),
        ("7", "3+4=7"),
        ("7", "x = 3+4 = 7"),
        ("7", r"f(x) = 7"),
        ("y=2x+3", "y=2x+3"),
        ("y=2x+3", "2x+3=y"),
        ("x=4", "4"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("(1,2)", r"\left(1,2\right)"),
        ("(5,8)", "(x, y) = (5, 8)"),
        (r"(3, \frac{\pi}{2})", r"(3,\pi/2)"),
        ("1,2", "2,1"),
        (r"5\text{ km}", r"5\text{ kilometers}"),
        ("5", r"5\text{ km}"),
        ("1000", r"1\,000"),
        ("12345", "12 345"),
        ("602000000000000000000000", "6.02e23"),
        (r"\frac12", "½"),
        ("2.5", "2,5"),
        (r"\sqrt{2}", "1.41421356"),
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
        ("x^2+2x+1", "(x+1)^2"),
        ("1", r"\sin^2(x)+\cos^2(x)"),
        ("x<3", "3>x"),
        (r"(-\infty,3)", "x<3"),
        (r"50\%", "0.5"),
        (r"\text{(C)}", "C"),
        ("x > 5", "Therefore $x > 5$ is the solution."),
        (r"\boxed{1} and \boxed{2}", "1,2"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)
def test_equal(reference, answer):
    found = compare(reference, answer)
    assert found.equal, found.reason


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("0", "5x-7y+11z+4=0"),
        ("7", "8=7"),
        ("11", "x+1=11"),
        ("x=4", "y=4"),
        ("y=2x+3", "x=x"),
        ("7", "7=7=8"),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        ("2^{100}", "2^{100}+1"),
        ("0.0000001", "0.0000002"),
        ("(1,2)", r"\{1,2\}"),
        (r"\{1,2\}", "(1,2)"),
        ("(1,2)", "(2,1)"),
        ("(2,1)", "(5,3)"),
        ("[1,2]", "(1,2)"),
        ("5 km", "5 m"),
        ("4", "4, 4"),
        ("4", r"\infty"),
        ("4", "\x00"),
        ("4", "{" * 400 + "}" * 400),
        (r"\sqrt{2}", "1.4142"),
        (r"\pi", "3.14"),
        ("x<3", "x<4"),
        (r"(-\infty,3)", r"(-\infty,3]"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        ("C", "D"),
    ],
)
def test_different(reference, answer):
    found = compare(reference, answer)
    assert not found.equal, found.reason


@pytest.mark.parametrize("reference", ["x=x", "1=1", "1=2", r"\emptyset", "True", r"\frac{1}{", r"\notacommand{"])
def test_a_reference_that_cannot_be_compared_with_is_refused_whatever_the_answer(reference):
    for answer in ("8", reference):
        with pytest.raises(BadReference):
            compare(reference, answer)


def test_the_answer_is_looked_at_only_after_the_reference():
    events = []
    compare("2^{10}", "1024", lambda: events.append("read"))
    assert events == ["read"]
