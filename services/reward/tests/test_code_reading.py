"""The program in a completion, and when two outputs or results are the same."""

import pytest

from quartet_reward.code.completion import ProgramIn, find_program
from quartet_reward.code.values import OutputComparison, plain, same, same_output

DOCUMENTED = '''def f():
    """Add.

    ```python
    f()
    ```
    """
    return 1'''
FENCED = [
    # Any fence and case of Python.
    *(f"So:\n{fence}{name}\na = 1\n{fence}\nDone."
      for fence in ("```", "~~~", "`````")
      for name in ("python", "Python", "PYTHON", "py", "Py3", "python3", "python3.11", " Python 3", "{python}",
                   "{.python .lines}", "python title='a.py'", "ipython3", "", "\npython")),
    "So: ```python\na = 1\n``` Done.",
    "So: ```python a = 1```",
    "```python\na = 1```",
    "<answer>\n```python\na = 1\n```</answer>",
    "1. So:\n\n   ```python\n   a = 1\n   ```\n",
    "1. ```python\n   a = 1\n   ```\n",
    "```python\n    a = 1\n```",
    # The last one that has an end, or else the last one.
    "```python\nb = 2\n```\n```python\na = 1\n```",
    "```python\na = 1\n```\nOr:\n```python\nb = ",
    "```python\nb = 2\n```python\na = 1\n```",
    "In:\n```\n5\n```\n```python\na = 1\n",
    "```\na = 1\n```\n```\n5\n```",
    "```\na = 1\n```\n```\nf(5)\n```",
    "```python\ndef f(:\n    \"\"\"no\n```\nSorry.\n```python\na = 1\n```",
    # Not what is in another language, and not what is in a thought.
    *(f"```python\na = 1\n```\nRun it:\n```{other}\nb = 2\n```"
      for other in ("bash", "text", "json", "pycon", "python-repl", "pyret", "c++")),
    "<think>```python\nno = 1\n```</think>\n```python\na = 1\n```\nIt is ```O(1)```.",
    "[THINK]\n```python\nno = 1\n```[/THINK]a = 1",
    # Without a fence, or with its end alone.
    "a = 1",
    " a = 1\n",
    "a = 1\n```\nThis runs in O(1).",
]  # fmt: skip


@pytest.mark.parametrize("completion", FENCED)
def test_a_program_is_found(completion):
    assert find_program(completion).source.strip() == "a = 1"


@pytest.mark.parametrize("around", ["```python\n{}\n```\nDone.", "~~~\n{}\n~~~", "{}", "{}\n```\nDone.", "```py\n{}"])
@pytest.mark.parametrize(
    "program", [DOCUMENTED, "x = '```'  # ```\nprint(x)", f"{DOCUMENTED}\nif f():\n    print(f())"]
)
def test_a_fence_within_a_text_of_the_program_is_not_its_end(around, program):
    assert find_program(around.format(program)).source.strip() == program


@pytest.mark.parametrize(
    "completion",
    [
        "", "I give up.", "The answer is 5.", "42", "# Solution\n\nWe add them.", "```bash\npython a.py\n```",
        "```\n5\n```", "```python\n\n```", "```json\n{}", "<think>\n```python\na = 1\n```\nNo, wait",
        "<think>a = 1", "It is ```O(1)```.",
    ],
)  # fmt: skip
def test_prose_is_no_program(completion):
    assert find_program(completion) is None


@pytest.mark.parametrize(
    ("prompt", "completion", "program"),
    [
        ("Add.\n```python\n", "a = 1\n```\nDone.", "a = 1"),
        ("Add.\n```python", "\na = 1\n```\nDone.", "a = 1"),
        ("Add.\n~~~Py3\n", "a = 1", "a = 1"),
        ("Add.\n````python\n", "a = 1\n````", "a = 1"),
        ("Add.\n```python\ndef f(n):\n", "    return n\n```", "def f(n):\n    return n"),
        ("Add.\n```python\n", "```python\na = 1\n```", "a = 1"),
        ("Add.\n```python\n", "b = 2\n```\nBetter:\n```python\na = 1\n```", "a = 1"),
        ("In:\n```\n5\n```\n", "a = 1", "a = 1"),
        ("Mend:\n```python\nb = \n<|im_end|>\n<|im_start|>assistant\n", "```python\na = 1\n```", "a = 1"),
        ("<think>\n", "```python\na = 1\n```", None),
        ("<think>\n```python\n", "b = 2\n```</think>\n```python\na = 1\n```", "a = 1"),
    ],
)
def test_a_prompt_may_open_the_fence(prompt, completion, program):
    found = find_program(completion, prompt=prompt)
    assert (found.source.strip() if found else None) == program


def test_a_program_that_continues_a_prefix_keeps_its_indentation():
    for completion in ("    return n\n", "```python\n    return n\n```"):
        assert find_program(completion, prefix="def f(n):\n").source.startswith("    return")
        assert find_program(completion).source.startswith("return")


def test_the_whole_completion_is_the_program_where_a_run_says_so():
    said = "```python\nno = 1\n```"
    assert find_program(f"<think>x</think>{said}", ProgramIn.COMPLETION).source == said
    assert find_program(" \n", ProgramIn.COMPLETION) is None


@pytest.mark.parametrize(
    ("found", "expected", "how", "right"),
    [
        ("1 2\n3\n", "1 2\n3", {}, True),
        ("1 2  \r\n3\n\n\n", "1 2\n3", {}, True),
        ("1  2\n3", "1 2\n3", {}, False),
        ("1 2 3", "1\n2  3\n", {"compare": "tokens"}, True),
        ("0.3333334", "0.3333333", {"tolerance": 1e-6}, True),
        ("0.334", "0.333", {"tolerance": 1e-6}, False),
        ("nan", "1", {"tolerance": 1}, False),
        ("1 1", "1\n1", {"tolerance": 1}, False),
        ("a\n\nb", "a\nb", {}, False),
        ("a", "a\nb", {}, False),
        # A tolerance is for floats.
        ("1000000006", "1000000007", {"tolerance": 1e-6}, False),
        ("1000000006.9", "1000000007", {"tolerance": 1e-6}, False),
        ("1e9", "1000000007", {"tolerance": 1e-6}, False),
        ("3.0", "3", {"tolerance": 1e-6}, True),
        ("3", "3.0000001", {"tolerance": 1e-6}, True),
        ("007", "7", {"tolerance": 1e-6}, False),
        ("1_0.5", "10.5", {"tolerance": 1e-6}, False),
        ("2.5e-1 x", "0.25 x", {"tolerance": 1e-6}, True),
        ("Infinity", "inf", {"tolerance": 1e-6}, True),
        ("1" * 5000 + ".5", "1" * 5000, {"tolerance": 1e-6}, False),
        # Three things that people call lenient are one parameter.
        ("YES  \n0.333334\n\n", "Yes\n0.333333", {"compare": "lenient"}, True),
        ("0.3334", "0.3333", {"compare": "lenient"}, False),
        ("0.334", "0.333", {"compare": "lenient", "tolerance": 0.01}, True),
        ("No", "Yes", {"compare": "lenient"}, False),
        ("8", "9", {"compare": "lenient"}, False),
        ("Yes", "yes", {"tolerance": 0.1}, False),
    ],
)
def test_outputs_are_compared(found, expected, how, right):
    assert same_output(found, expected, OutputComparison.of(**{"compare": "lines", "tolerance": 0.0, **how})) is right


@pytest.mark.parametrize(
    ("found", "expected", "how", "right"),
    [
        ((1, (2,)), [1, [2]], {}, True),
        ({1: "a", None: 2}, {"1": "a", "null": 2}, {}, True),
        ([0.1 + 0.2], [0.3], {"tolerance": 1e-9}, True),
        (10**400, 1.5, {"tolerance": 1e-9}, False),
        ({1, 2}, [1, 2], {}, False),
        (10**9 + 6, 10**9 + 7, {"tolerance": 1e-6}, False),
        (10.0**9 + 6.9, 10**9 + 7, {"tolerance": 1e-6}, False),
        ([3.0], [3], {"tolerance": 1e-6}, True),
        ("0.3333333", "0.3333334", {"tolerance": 1e-6}, False),
        ("12", 12, {"tolerance": 1}, False),
        (12, "12", {"compare": "lenient"}, False),
        (["Yes \n"], ["YES"], {"compare": "lenient"}, True),
        ({"a": 0.333334}, {"a": 0.333333}, {"compare": "lenient"}, True),
        ("a b", "ab", {"compare": "lenient"}, False),
    ],
)
def test_results_are_compared(found, expected, how, right):
    comparison = OutputComparison.of(**{"compare": "lines", "tolerance": 0.0, **how})
    assert same(plain(found), expected, comparison) is right
