"""Which of a completion's statements is its answer."""

import time

import pytest

from quartet_reward.math.extract import ReadingPolicy, final_answer, reference_answer

ANYWHERE = ReadingPolicy()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # tags, then boxes, then prose
        (r"<answer>5</answer> \boxed{6} The answer is 7.", "5"),
        (r"<answer>The answer is $x = 5$.</answer>", "x = 5"),
        (r"The answer is 7, so \boxed{6}", "6"),
        # several boxes
        (r"\boxed{5} no, wait. \boxed{6}", "6"),
        (r"\boxed{1}, \boxed{2} and \boxed{3}", "1, 2, 3"),
        (r"\boxed{1} no no no no no \boxed{2}", "2"),
        (r"\boxed{x=9} or \boxed{9}", "x=9 or 9"),
        (r"\boxed{3} + \boxed{4} = \boxed{7}", "3 + 4 = 7"),
        (r"First \boxed{12}; final \boxed{20}", "20"),
        (r"$x=\boxed{4}$ and therefore $x+5=\boxed{9}$", "9"),
        ("$$\\boxed{4}$$\n$$\\boxed{9}$$", "9"),
        (r"\boxed{9} (not \boxed{8}, or \boxed{10})", "9"),
        (r"$\boxed{1}$ hen and $\boxed{2}$ goats", "1, 2"),
        (r"\boxed{8} \boxed{8}", "8"),
        (r"$\\boxed{\\frac{1}{2}}$", r"\frac{1}{2}"),
        # prose
        ("The answer is 8.", "8"),
        ("**Answer:** 1,000 apples", "1,000"),
        (r"Therefore $x \geq 5$ is the solution.", r"x \geq 5"),
        ("The roots are $x=1$ and $x=2$.", "x=1, x=2"),
        ("it costs $7.78 for her. Final Answer: The final answer is 7.78.", "7.78"),
        ("It is 5 km away.", r"5 \text{ km}"),
        ("The answer is east.", "east"),
        ("The answer is not 8 but 9.", "9"),
        (r"\boxed{\frac{25}{13}} = \boxed{1\frac{12}{13}}", r"\frac{25}{13} = 1\frac{12}{13}"),
        # nothing
        ("", None),
        ("answer: 8*(lambda: exit())()", None),
    ],
)
def test_the_answer_is_found(text, answer):
    assert final_answer(text, ANYWHERE) == answer


@pytest.mark.parametrize(
    ("text", "policy", "answer"),
    [
        (r"\boxed{1}, \boxed{2}", ReadingPolicy(boxes="last"), "2"),
        (r"<answer>5</answer> \boxed{6}", ReadingPolicy(answer_in="box"), "6"),
        (r"\boxed{6}, so the answer is 7.", ReadingPolicy(answer_in="prose"), "7"),
        ("The answer is 7.", ReadingPolicy(prose="formulas"), None),
        ("The answer is (B).", ReadingPolicy(choices=("A", "B")), "B"),
        ("B. Because A is not valid", ReadingPolicy(choices=("A", "B")), "B"),
        ("All Beginnings are hard", ReadingPolicy(choices=("A", "B")), None),
    ],
)
def test_a_policy_says_where_the_answer_stands(text, policy, answer):
    assert final_answer(text, policy) == answer


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("8", "8"),
        (r"We see that $x = 3$, so \boxed{9} it is.", "9"),
        ("$1$ and $2$ and $3$", "1, 2, 3"),
        (r"$\\boxed{35 cm} ++++++ \\boxed{4}$", "35 cm, 4"),
        ("9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("**72**", "72"),
        ("= 72", "72"),
        ("The area is 72", "72"),
        (r"The answer is $\frac12$.", r"\frac12"),
        ("18 x 10 = 180 days.\nTherefore, the answer is: 180.", "180"),
        ("New York", "New York"),
        ("11 hens and 4 goats", "11 hens and 4 goats"),
        ("The function is increasing", "The function is increasing"),
    ],
)
def test_a_reference_may_be_a_worked_solution(reference, answer):
    assert reference_answer(reference, ANYWHERE) == answer


@pytest.mark.parametrize("form", ["{}", "${}$", "$${}$$", r"\[{}\]", r"\boxed{{{}}}", "So it is\n\\[{}\\]"])
@pytest.mark.parametrize(
    "gold",
    [
        r"\begin{pmatrix}x\\y\end{pmatrix} = \begin{pmatrix}1\\2\end{pmatrix} + t \begin{pmatrix}3\\4\end{pmatrix}",
        r"\mathbf{v} = \begin{pmatrix} 1 \\[1ex] 2 \\(3) \end{pmatrix}",
        "x = 1 + 2t,\ny = 3 - t,\nz = 1",
        "+".join(r"\begin{pmatrix} \cos a & -\sin a \\ \sin a & 1 \end{pmatrix}" for _ in range(5)) + "= 1",
    ],
)
def test_a_reference_of_several_lines_is_read_whole(form, gold):
    assert reference_answer(form.format(gold), ANYWHERE) == gold


PIECES = (
    *("answer is $", "1 234", r"\boxed{", "$", "is ", r"\[", r"\(", r"answer \[", "$$ a", "answer 3 is ", ". 1 ", "1+"),
    *("<answer>", "1 and ", "$x$ is ", r"\\", "=", " ", "answer A ", "1 km", r"\frac{", "not 1 ", r"\boxed{1},", "A "),
)


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_text_is_read_at_once(piece):
    text = piece * (250_000 // len(piece))
    began = time.process_time()
    final_answer(text, ANYWHERE)
    final_answer(text, ReadingPolicy(choices=("A", "B")))
    reference_answer(text, ANYWHERE)
    assert time.process_time() - began < 1
