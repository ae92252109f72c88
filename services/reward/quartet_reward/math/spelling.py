"""Normalizes how an answer is spelled: delimiters, typed notation and the variants of LaTeX. Text only."""

import re
from fractions import Fraction

from quartet_reward.math.typed import typed_as_latex

_SEVERAL_SPELLINGS = re.compile(r"[\\=~{]|\s\s|[\t\n]|C\s*_")
_FUNCTIONS = "arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp|gcd|lcm|det"
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\(?:left|right|middle|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])", ""),
        # "32,\! 349" prints as 32,349: the negative space cancels the space after the comma.
        (r",\\!\s*(?=\d{3}(?!\d))|\{,\}", ","),
        (r"(?<!\\)\\[,;:! ]|~|\s+", " "),
        (r"\\(?:d|t|c)frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:d|t)binom(?![a-zA-Z])", r"\\binom"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
        # Binomial coefficients: {}_nC_k, ^nC_k, C_n^k.
        (r"(?:\{\s*\})?[_^]\s*\{?(\d+|[a-z])\}?\s*\\?C\s*_\s*\{?(\w+)\}?", r"\\binom{\1}{\2}"),
        (r"(?<![a-zA-Z\\])C\s*_\s*\{?([3-9]|\d\d+|[nm])\}?\s*\^\s*\{?(\w+)\}?", r"\\binom{\1}{\2}"),
        (r"\\frac\s*(\\pi|\w)\s*(?=[\w{\\])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\\pi|\w)", r"\1{\2}"),
        (r"\\(le|ge|ne)(?:q|qq|qslant)(?![a-zA-Z])", r"\\\1"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"(?<=\s)!=", r"\\ne "),  # but 5!=120 is a factorial
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\(?:mid|[lr]?vert)(?![a-zA-Z])", "|"),
        (r"\\(?:hat|vec|text|mathbf|boldsymbol)\s*\{\s*\\?([ijk])(?:math)?\s*\}(?=\s*(?:$|[-+]))", r"\\unit{\1}"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", r"^\\circ"),
        # Upright constants, which math-verify would drop as units.
        (r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}", r" \1 "),
        (rf"\\(?:mathrm|text|operatorname)\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
        (r"\\(?:text(?:bf|it|rm|normal|sf)|mathrm|mathbf|mathit|mbox|operatorname)\s*(?=\{)", r"\\text"),
        (r"\\text\s*\{\s*,?\s*(and|or)\s*\}", r" \1 "),
        (r"[(\[]\s*\\begin\{array\}\s*\{[clr| ]*\}(.*?)\\end\{array\}\s*[)\]]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    )
)
# Not \cases with an &, which is a piecewise function.
_LINES = re.compile(
    r"(?:\\\{\s*)?\\begin\{(?P<name>(?:align|gather|equation)(?:ed)?\*?|cases(?![^&]*&))\}(?P<lines>.*)\\end\{(?P=name)\}",
    re.DOTALL,
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))")
# 0.1(6), and 0.1666...: at least three repetitions.
_REPEATING_TYPED = re.compile(
    r"(-?)(\d+)\.(?:(\d*)\((\d+)\)|(\d*?)(\d{1,6}?)\6{2,}(?:\.\.\.|…|\\(?:l?dots|cdots)))", re.ASCII
)
# In lists and brackets a comma may separate elements instead. India groups 12,34,567.
_GROUPS = r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3}|[1-9]\d{0,2}(?:'\d{3})+"
_THOUSANDS = re.compile(rf"(?<![\d,.\w])(?:{_GROUPS})(?![\d,'])", re.ASCII)
# Words before the answer inside its box.
_LEAD_IN = re.compile(r"^\\text\s*\{[^{}\\]*(?:\bis|\bare|:|=)\s*\}\s*(?=\S)")
# Open ends written as ]a, b[.
_TURNED = (
    (re.compile(r"\](\s*[^][()]+?[,;][^][()]+?)\["), r"(\1)"),
    (re.compile(r"\](\s*[^][()]+?[,;][^][()]+?)\]"), r"(\1]"),
    (re.compile(r"\[(\s*[^][()]+?[,;][^][()]+?)\["), r"[\1)"),
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_FORMULA = re.compile(r"(?<![\\$])\$\$?[^$]+\$\$?")
_PROSE = re.compile(r"[A-Za-z\s.,:;'’!-]+")


def plain(text: str) -> str:
    """Return `text` without delimiters and decoration, normalized: `\\frac` for `\\dfrac`, `-` for an en dash…"""
    text = typed_as_latex(undelimited(_only_formula(text.strip())))
    for pattern, spelling in _SPELLINGS if _SEVERAL_SPELLINGS.search(text) else ():
        text = pattern.sub(spelling, text)
    if lines := _LINES.fullmatch(text.strip()):
        text = _as_one_line(lines)
    text = _REPEATING.sub(_as_fraction, _LEAD_IN.sub("", text.strip()))
    if repeating := _REPEATING_TYPED.fullmatch(text):
        sign, whole, *parts = repeating.groups("")
        return sign + _fraction(whole, parts[0] or parts[2], parts[1] or parts[3])
    if ("," in text or "'" in text) and not re.search(r"[(\[]|\\\{", text):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", "").replace("'", ""), text)
    if text.startswith("]") or text.endswith("["):
        for pattern, spelling in _TURNED:
            text = pattern.sub(spelling, text)
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def undelimited(text: str) -> str:
    """Return `x` for `$x$`, `\\[x\\]` and the like, if one pair of delimiters encloses all."""
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            # "$5$ and $6$" is not one formula.
            return inner.strip() if opening not in inner and closing not in inner else text
    return text


def _only_formula(text: str) -> str:
    """Return `$x > 5$` for `Therefore $x > 5$ is the solution`; other text as it is."""
    formulas = list(_FORMULA.finditer(text)) if "$" in text else []
    if len(formulas) != 1:
        return text
    prose = text[: formulas[0].start()] + text[formulas[0].end() :]
    return formulas[0][0] if prose.strip() and _PROSE.fullmatch(prose) else text


def _as_one_line(match: re.Match[str]) -> str:
    """Return lines of equations as a list; a line that begins with an equals sign continues the previous one."""
    lines = [line.replace("&", " ").strip(" ,") for line in re.split(r"\\\\(?:\[[^\]]*\])?", match["lines"])]
    return re.sub(r",\s*=", " =", ", ".join(filter(None, lines)))


def _as_fraction(match: re.Match[str]) -> str:
    return _fraction(match[1] or "0", match[2], match[3] or match[4])


def _fraction(whole: str, fixed: str, repeated: str) -> str:
    """Return the fraction of a repeating decimal."""
    value = Fraction(int(whole + fixed + repeated) - int(whole + fixed), 10 ** len(fixed) * (10 ** len(repeated) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
