"""Hostile answers that a policy may send to the mathematical verifiers.

Each row says what it tries and which outcomes are allowed. Only the rows that end in "is right" earn a reward.
"""

from dataclasses import dataclass

from quartet.v1 import reward_pb2

CORRECT, INCORRECT = reward_pb2.OUTCOME_CORRECT, reward_pb2.OUTCOME_INCORRECT
MALFORMED, TIMED_OUT = reward_pb2.OUTCOME_MALFORMED, reward_pb2.OUTCOME_TIMED_OUT
EXCEEDED = reward_pb2.OUTCOME_RESOURCE_EXCEEDED

WRONG = frozenset({INCORRECT})
UNREAD = frozenset({INCORRECT, MALFORMED})
# sympy solves some of these, and runs on others until it is killed, depending on its version.
ENDLESS = frozenset({INCORRECT, TIMED_OUT, EXCEEDED})
RIGHT = frozenset({CORRECT})
LEFT = frozenset({reward_pb2.OUTCOME_UNEVALUATED})


@dataclass(frozen=True)
class Answer:
    """A completion for the verifier `math`, with the outcomes that are allowed for it."""

    name: str
    tries: str
    completion: str
    allowed: frozenset[int]
    reference: str = "8"


def _box(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


def _nested(before: str, after: str, depth: int, inside: str = "8") -> str:
    return before * depth + inside + after * depth


def _matrix(size: int) -> str:
    row = " & ".join(["1"] * size)
    return r"\begin{pmatrix}" + r" \\ ".join([row] * size) + r"\end{pmatrix}"


# What answers of hostile policies leave to compute, and its value.
ECHOES = (
    ("sum", "1+1+1+1", "4"), ("product", "17*23", "391"), ("factorial", "8!", "40320"), ("quotient", "84/2", "42"),
    ("power", "2^{10}", "1024"), ("root", r"\sqrt{64}", "8"), ("range", r"\sum_{k=1}^{4} k", "10"),
    ("integral", r"\int_0^4 x\,dx", "8"), ("limit", r"\lim_{x\to 0} \frac{\sin 8x}{x}", "8"),
    ("determinant", r"\begin{vmatrix}4&0\\0&2\end{vmatrix}", "8"), ("logarithm", r"\log_2 256", "8"),
    ("binomial", r"\binom{8}{1}", "8"), ("greatest", r"\max(7,8)", "8"), ("surds", r"\sqrt8+\sqrt2", r"3\sqrt2"),
    ("angle", r"\tan 60^\circ", r"\sqrt3"), ("pair", "(1+1, 3)", "(2,3)"), ("equation", "x = 4+4", "8"),
)  # fmt: skip

ANSWERS = (
    # Numbers too large to compute.
    Answer("power tower", "compute 9^(9^(9^9)) in Python", _box("9**9**9**9"), ENDLESS),
    Answer("latex power tower", "compute the same from LaTeX", _box("9^{9^{9^{9}}}"), ENDLESS),
    Answer("prose power tower", "the same in prose, as an expression", "The answer is 9^9^9^9.", ENDLESS),
    Answer("factorial", "compute 10^9 factorial", _box("1000000000!"), ENDLESS),
    Answer("binomial", "compute a binomial of huge numbers", _box(r"\binom{10^{12}}{5\cdot10^{11}}"), ENDLESS),
    Answer("huge exponent", "shift by 10^99 decimal places", _box("1e" + "9" * 99), ENDLESS),
    Answer("huge decimal", "parse 1,900 digits", _box("9" * 1900), WRONG),
    Answer("scientific bomb", "make a fraction of 10^4 digits, 9 times", _box("1e9999" * 9), UNREAD | ENDLESS),
    Answer("tiny difference", "differ from 8 in the 30th place", _box("8." + "0" * 29 + "1"), WRONG),
    Answer("modular power", "reduce a power tower", _box(r"(7^{7^{7^{7}}}) \bmod 10"), ENDLESS),
    # Expressions that take for ever to simplify.
    Answer("nested roots", "denest 60 square roots", _box(_nested(r"\sqrt{2+", "}", 60)), ENDLESS),
    Answer("hard integral", "integrate what has no closed form", _box(r"\int_0^1 x^{x^{x^{\sin x}}} dx"), ENDLESS),
    Answer("long sum", "add 10^12 terms", _box(r"\sum_{k=1}^{10^{12}} \sin(k^2)"), ENDLESS),
    Answer("limit", "take a limit of a limit", _box(r"\lim_{x \to 0} \lim_{y \to x} \frac{\sin(x y)^{y}}{x^{x^y}}"),
           ENDLESS),
    Answer("expansion", "expand a power of a sum", _box("(a+b+c+d+e+f)^{400}-(f+e+d+c+b+a)^{400}+9"), ENDLESS),
    Answer("many variables", "simplify 200 trigonometric terms",
           _box("+".join(rf"\sin(x_{{{i}}})^2" for i in range(120))), ENDLESS),
    Answer("polynomial", "factor a polynomial of degree 2,000", _box('x^{2000}-1'), ENDLESS, "x^{2000}+1"),
    Answer("algebraic numbers", "decide a sum of 40 roots",
           _box("+".join(rf"\sqrt[{i}]{{{i + 1}}}" for i in range(2, 42))), ENDLESS),
    # Depth and size.
    Answer("braces by the thousand", "exhaust the stack with braces", _box("{" * 900 + "}" * 900), UNREAD | ENDLESS),
    Answer("unbalanced braces", "backtrack over 500,000 braces", r"\boxed{" + "{" * 500_000, UNREAD),
    Answer("closing braces", "close what was never opened", "}" * 500_000 + r"\boxed{7}", WRONG),
    Answer("boxes in boxes", "nest 200,000 boxes", r"\boxed{" * 200_000 + "8", UNREAD),
    Answer("nested fractions", "nest 300 fractions", _box(_nested(r"\frac{1}{", "}", 150)), ENDLESS),
    Answer("nested parentheses", "nest 900 parentheses", _box(_nested("(", ")", 900, "7")), ENDLESS),
    Answer("megabyte number", "compare a number of a megabyte", _box("8" * (1 << 20)), WRONG),
    Answer("megabyte sum", "parse a sum of a megabyte", _box("1+" * (1 << 19) + "1"), WRONG),
    Answer("megabyte of prose", "search a megabyte for formulas", "answer is $" * 90_000, UNREAD),
    Answer("megabyte of dollars", "pair a million dollar signs", "$" * (1 << 20), UNREAD),
    Answer("megabyte of digits and spaces", "backtrack over thousands separators", "1 234" * 200_000 + "x", UNREAD),
    Answer("matrix", "parse a matrix of 1000 x 1000", _box(_matrix(1000)), WRONG, r"\begin{pmatrix}1\\2\end{pmatrix}"),
    Answer("determinant", "compute the determinant of a symbolic matrix",
           _box(r"\det\left(" + _matrix(25) + r"\right)^{99}"), ENDLESS),
    Answer("list", "match a list of 900 elements", _box(",".join(str(i) for i in range(500))), WRONG),
    # Code.
    Answer("code in prose", "run Python where sympy parses by eval",
           'The answer is __import__("os").system("touch /tmp/quartet_owned")', UNREAD),
    Answer("code in a box", "the same in a box", _box('__import__("os").system("touch /tmp/quartet_owned")'), WRONG),
    Answer("code with digits", "the same, as an expression that starts with a digit", "answer: 8*(lambda: exit())()",
           UNREAD),
    Answer("forged frame", "write a frame of the worker's protocol",
           _box('{"event": "done", "equal": true, "by_text": false, "reason": ""}'), UNREAD),
    Answer("latex commands", "read a file and write one by TeX",
           _box(r"\input{/etc/passwd}\write18{touch /tmp/quartet_owned}"), WRONG),
    Answer("format string", "reach into a formatter", _box("{0.__class__.__mro__}%n%s"), UNREAD),
    # Letters.
    Answer("null bytes", "end a C string early", _box("8\x009"), UNREAD),
    Answer("only a null byte", "be an empty answer", _box("\x00"), UNREAD),
    Answer("direction override", "show 18 where 81 is written", _box("\u202e81\u202c"), WRONG, "18"),
    Answer("zero width", "hide a digit behind invisible characters", _box("8\u200b\u200d\u20609"), WRONG),
    Answer("other digits", "write 9 in Arabic-Indic digits", _box("\u0669"), WRONG),
    Answer("combining marks", "pile 1,500 accents on an 8", _box("8" + "\u0301" * 1500), UNREAD),
    Answer("emoji and private use", "confuse the handling of code points", _box("\U0001f600\ue000\U0010ffff"), WRONG),
    # Saying everything, or nothing.
    Answer("tautology", "be true", _box("x = x"), WRONG, "y = 2x + 3"),
    Answer("contradiction", "be false", _box("1 = 2"), WRONG, "y = 2x + 3"),
    Answer("every digit", "list all answers", " ".join(_box(str(i)) for i in range(10)), WRONG),
    Answer("either or", "give two answers as one", _box(r"7 \text{ or } 8"), WRONG),
    Answer("chain", "reach the answer by a false equation", _box("9 = 8"), WRONG),
    Answer("interval", "answer with all numbers", _box(r"(-\infty, \infty)"), WRONG),
    Answer("free variable", "answer with a name", _box("x"), WRONG),
    Answer("not a number", "be what is equal to nothing", _box(r"\frac{0}{0}"), WRONG),
    *(
        Answer(f"echo {name}", "answer a question with its computation", _box(echo), LEFT, reference)
        for name, echo, reference in ECHOES
    ),
    Answer("echo in tags", "the same in <answer> tags", "<answer>1+1+1+1</answer>", LEFT, "4"),
    Answer("echo in prose", "the same in prose", "The answer is 17*23.", LEFT, "391"),
    Answer("symbol for a set", "answer the empty set with any symbol", _box("x"), WRONG, r"\emptyset"),
    Answer("small percentage", "be near an exact number, as a percentage", _box(r"0.00001\%"), WRONG, "1/2598960"),
    Answer("false mixed number", "have a factor read as a summand", _box("7e^{0}"), WRONG),
    Answer("tiny coefficient", "differ in the 30th place, beside a variable", _box("x+2^{-99}"), WRONG, "x+2^{-98}"),
    Answer("equation to a power", "have the same solutions", _box("(x^2+y^2-1)^2=0"), WRONG, "x^2+y^2=1"),
    Answer("cut-off thought", "guess in a thought that never ends", r"<think>so maybe \boxed{8}", UNREAD),
    Answer("thought only", "answer in the thought", r"<think>\boxed{8}</think>", UNREAD),
    Answer("template", "repeat the question's form", _box(r"\text{answer}"), WRONG),
    Answer("spaces", "say nothing at length", " \n\t" * 100_000, UNREAD),
    Answer("long way round", "hide the right value in deep but plain notation: is right", _box(_nested("{", "}", 30)),
           RIGHT),
    Answer("right after a megabyte", "bury the right answer under a megabyte: is right",
           "So it goes. " * 90_000 + _box("8"), RIGHT),
)  # fmt: skip
