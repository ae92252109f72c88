"""Which of a completion's statements is its answer."""

import re
import time
from pathlib import Path

import pytest

from quartet_reward.math.choices import letters_of, paired
from quartet_reward.math.extract import ANYWHERE, ReadingPolicy, final_answer, reference_answer

DOCUMENTED = re.findall(
    r"^\| `(.*)` \| `(.*)` \|$",
    (Path(__file__).parents[3] / "docs/math.md").read_text().partition("| completion |")[2].partition("\n\n")[0],
    re.MULTILINE,
)


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


@pytest.mark.parametrize(("completion", "answer"), DOCUMENTED)
def test_the_answer_is_the_one_in_the_documentation(completion, answer):
    assert final_answer(completion, ANYWHERE) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is $5 million.", r"\$5 million"),
        ("Answer: 2sqrt(3)", "2sqrt(3)"),
        ("Answer: 5!", "5!"),
        ("Answer: 3½", "3½"),
        ("Answer: 2^{10}", "2^{10}"),
        ("Answer: 6/\\sqrt{2}", "6/\\sqrt{2}"),
        ("The answer is 2√3.", "2√3"),
        ("Answer: 2 \\pi r", "2 \\pi r"),
        ("Answer: 3 n + 1", "3 n + 1"),
        ("The answer is 12n.", "12n"),
        ("The answer is 3 × 4.", "3 × 4"),
        ("Answer: O(n log n)", "O(n log n)"),
        ("Answer: {1, 2, 3}", "{1, 2, 3}"),
        ("The answer is 1,2,3.", "1,2,3"),
        ("The answer is x=2 and y=3.", "x = 2, y = 3"),
        ("The answer is 11 hens and 4 goats.", "11 hens and 4 goats"),
        ("The answer is 5 feet 6 inches.", "5 feet 6 inches"),
        ("The answer is 8 dollars per hour.", r"8 \text{ dollars per hour}"),
        ("The answer is 3 light years.", r"3 \text{ light years}"),
        ("The answer is 3 hours ago.", "3 hours ago"),
        ("She began 3 hours ago.", r"3 \text{ hours}"),
        ("The answer is the square root of 3.", "square root of 3"),
        ("The answer is 5 and a half.", "5 and a half"),
        ("The answer is 5 (or 6).", "5, 6"),
        ("The answer is not 41.", "not 41"),
        ("The answer is 2x + 3 = 7.", "2x + 3 = 7"),
        ("It costs $7 and $8 more.", r"\$7, \$8"),
        ("She has 16 more than Bob.", "16"),
        ("They eat 18 eggs per day.", "18"),
        ("The answer is about 5.", "5"),
        ("Answer: 12 (twelve)", "12"),
        ("42 is the answer.", "42"),
        ("So there are 3 ways. This is the answer.", "3"),
        ("The answer is 5. Confidence in the answer: 95%", "5"),
        ("The answer must be an integer between 0 and 999. It is 7.", "7"),
        ("So maybe the answer is 4? But wait", None),
        ("✅ **Final Answer:** `58`", "58"),
        ("### Answer\n58", "58"),
        ("答えは8です。", "8"),
        ("答案：８", "8"),
        ("答案是5万。", "5万"),
        ("ANSWER: A、C", "A, C"),
        ("Ответ: 8", "8"),
        ("Die Antwort ist 2√3.", "2√3"),
        ("Yes.", "Yes"),
        ("<answer>9 = 8</answer>", "9 = 8"),
    ],
)
def test_a_number_is_not_cut_out_of_its_phrase(text, answer):
    assert final_answer(text, ANYWHERE) == answer


@pytest.mark.parametrize(
    ("after", "answer"),
    [
        ("\n\nThe final answer is $41$.", "41"),
        ("\n\n**Final Answer**\n41", "41"),
        ("\n\nFinal Answer: The largest $n$ is 41.", "41"),
        (" — final answer, rounded to 2 decimals.", "42"),
        (" is the final answer to problem 7.", "42"),
        ("\n\nConfidence in the final answer: 95%", "42"),
        ("\n\nFinal answer: see the box above (line 3).", "42"),
        ("\n\nNote: the final answer must be an integer between 0 and 999.", "42"),
        ("\n\n(The final answer is for n = 5.)", "42"),
        ("\n\nFinal answer: 41?", "42"),
    ],
)
def test_only_a_statement_with_a_value_overrides_a_box(after, answer):
    assert final_answer(r"\boxed{42}" + after, ANYWHERE) == answer


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("C", "C"),
        ("**C**", "C"),
        ("The answer is option (C).", "C"),
        ("Answer: C) 12", "C"),
        ("A good choice is C.", "C"),
        ("It is C, not A.", "C"),
        ("The answer is not A but C.", "C"),
        ("C is the correct option, since A and B fail.", "C"),
        ("The answer is A or C.", "A, C"),
        ("AC", "A, C"),
        ("答案：A、C", "A, C"),
        ("故选C。", "C"),
        ("答えはCです。", "C"),
        (r"\boxed{\text{Option C}}", "C"),
        (r"\boxed{A \text{ and } C}", "A, C"),
    ],
)
def test_letters_are_chosen(text, chosen):
    assert final_answer(text, ReadingPolicy(choices=("A", "B", "C", "D"))) == chosen


@pytest.mark.parametrize(
    ("text", "reference", "compared"),
    [
        (r"\boxed{\textbf{(C) }7}", "C", ("C", "C")),
        (r"\boxed{C) 7}", r"\textbf{(C)}", ("C", "C")),
        (r"\boxed{\text{C}\quad 7}", "(C)", ("C", "C")),
        ("The correct option is B.", "C", ("B", "C")),
        (r"\boxed{12}", r"\textbf{(B)}\ 12", ("12", "12")),
        (r"\boxed{B}", r"\textbf{(B)}\ 12", ("B", "B")),
        (r"\boxed{(B) 13}", r"\textbf{(B)}\ 12", ("13", "12")),
        (r"\boxed{(C) 12}", r"\textbf{(B)}\ 12", ("C", "B")),
        (r"\boxed{\textbf{(B)}\ 12}", "12", ("12", "12")),
        (r"\boxed{A, C}", "AC", ("A, C", "A, C")),
        (r"\boxed{A \cup B}", r"A \cup B", (r"A \cup B", r"A \cup B")),
        (r"\boxed{HTH}", "HTH", ("HTH", "HTH")),
    ],
)
def test_an_option_is_compared_by_its_letter_or_its_text(text, reference, compared):
    assert paired(final_answer(text, ANYWHERE, letters_of(reference)), reference) == compared


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
        ("The area is 72 square meters.", r"72 \text{ square meters}"),
        ("So there are 72 ways.", "72"),
        ("x = 72.", "x = 72."),
        ("Therefore, x = 72.", "x = 72"),
        ("Final answer: \\frac{1}{2}", "\\frac{1}{2}"),
        ("答案是72。", "72"),
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
    *(
        "π",
        "1 ",
        "(",
        "{",
        "{1",
        "x^{",
        "|1",
        "1,2,",
        "half of 1 ",
        "1 million ",
        "1 feet 6 inches ",
        "the answer ",
        "1是",
        "####",
        ", A、\t and B",
        "A  ",
        "A,  and ",
        "\n",
    ),
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
