"""Finds what an answer leaves to compute, where the reference is a number: the question is not an answer.

An answer may have what the reference itself has. Beside that, a rational number is answered by digits: an integer, a
decimal, a fraction (not for an integer), a mixed number, a percentage, powers of ten. Any other number may also be
answered with fractions, surds, powers, and sums and products of what cannot be combined: `\\frac{1+\\sqrt5}{2}`,
`3\\pi`, `e \\cdot e`; but not with functions of numbers, factorials, sums, integrals, limits or determinants.
"""

import re

import sympy

_OPERAND_BEFORE = r"(?<=[\w})\]!|])\s*"
# The kinds of computations, by what they look like in normalized LaTeX.
_COMPUTATIONS = {
    "a sum": re.compile(_OPERAND_BEFORE + r"(?<![eE^{])[-+]"),
    "a product": re.compile(r"\\(?:cdot|times|ast)(?![a-zA-Z])|\*|\)\s*\(|(?<=\d)\s*\((?=.*\))|\)\s*(?=\d)"),
    "a quotient": re.compile(r"/|\\frac|\\div(?![a-zA-Z])"),
    "a power": re.compile(r"\^(?!\s*\\circ)"),
    "a root": re.compile(r"\\sqrt"),
    "a factorial": re.compile(r"!"),
    "a binomial coefficient": re.compile(r"\\binom|[CP]\s*\(\s*\d"),
    "a function": re.compile(
        r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-zA-Z])|\\(?:log|ln|exp)(?![a-zA-Z])"
        r"|(?<![a-zA-Z\\])(?:sin|cos|tan|log|ln|exp)(?![a-zA-Z])"
    ),
    "a rounded number": re.compile(r"\\[lr](?:floor|ceil)(?![a-zA-Z])"),
    "an absolute value": re.compile(r"\|"),
    "a greatest or least number": re.compile(r"\\(?:max|min|sup|inf|gcd|lcm)(?![a-zA-Z])|(?:gcd|lcm|max|min)\s*[(}]"),
    "a remainder": re.compile(r"\\[bp]?mod(?![a-zA-Z])"),
    "a sum or product over a range": re.compile(r"\\(?:sum|prod|dots|cdots|ldots)(?![a-zA-Z])|\.\.\."),
    "an integral": re.compile(r"\\i*int(?![a-zA-Z])"),
    "a limit": re.compile(r"\\lim"),
    "a derivative": re.compile(r"\\frac\s*\{\s*d|'"),
    "a determinant": re.compile(r"\\det(?![a-zA-Z])|\\begin\{[a-zA-Z]*matrix"),
}
# What numbers that are not rational may be written with.
_OF_IRRATIONALS = frozenset(["a sum", "a product", "a quotient", "a power", "a root"])
# Powers of ten, and the digits before them, are digits.
_SCIENTIFIC = re.compile(
    r"(?:\d+(?:\.\d+)?\s*(?:\\times|\\cdot|\*)\s*)?(?<![\d.])10\s*\^\s*(?:\{\s*[-+]?\d+(?:\.0+)?\s*\}|\d)"
)
_NUMBER = re.compile(r"^\s*[-+]+|(?<=[{(,])\s*[-+]+")
# A larger integer is written as a formula: 2^{1000}, 10^{300}-1.
_WRITTEN_OUT = 10**20


def computation_left(answer: str, found: sympy.Basic, reference: str, gold: sympy.Basic) -> str:
    """Return the kind of computation that `answer` leaves to do, or "" if it is as evaluated as `reference`.

    Args:
        answer, reference: normalized LaTeX.
        found, gold: their values, unevaluated as they were parsed; the reference is a number.
    """
    value = gold.doit()
    rational = value if isinstance(value, sympy.Rational) else None
    if rational is not None and max(abs(rational.p), rational.q) >= _WRITTEN_OUT:
        return ""
    allowed = set(_kinds(reference))
    if rational is None:  # decimals may stand for any number
        allowed |= _OF_IRRATIONALS
    elif rational.q != 1:
        allowed.add("a quotient")
    for kind in _kinds(answer):
        if kind not in allowed:
            return kind
    return _combinable(found) if rational is None and _combinable(gold) == "" else ""


def _kinds(text: str) -> list[str]:
    text = _NUMBER.sub("", _SCIENTIFIC.sub("1", text))
    return [kind for kind, pattern in _COMPUTATIONS.items() if pattern.search(text)]


def _combinable(value: sympy.Basic) -> str:
    """Return "a sum" or the like if rational numbers or like surds within an unevaluated value can be combined."""
    for node in sympy.preorder_traversal(value):
        if isinstance(node, sympy.Add):
            combined = sympy.Add(*(argument.doit() for argument in node.args))
            if len(sympy.Add.make_args(combined)) < len(node.args):
                return "a sum"
        elif isinstance(node, sympy.Mul):
            if sum(isinstance(one, sympy.Rational) and one.q == 1 and abs(one) != 1 for one in node.args) > 1:
                return "a product"
        elif isinstance(node, sympy.Pow) and isinstance(node.base, sympy.Rational) and node.exp != -1:
            whole = isinstance(node.exp, sympy.Integer)
            if node.base != 10 and node.base != 1 and isinstance(sympy.Pow(node.base, node.exp), sympy.Rational):
                return "a power" if whole else "a root"
    return ""
