"""Finds the formulas of a text, and the expressions outside formulas, each as a whole with its unit and its words.

What follows a number decides whether it stands alone: in "3 apples" it does; in "2 sqrt(3)", "5 million", "5 divided by
seven" and "at least 5" it does not. All patterns take linear time: repetitions are possessive, or short.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quartet_reward.math.notation import is_name
from quartet_reward.math.phrases import with_unit, words_after, words_before
from quartet_reward.math.words import CJK

_FORMULA = (
    r"(?<!\\)\$\$(?P<display>(?:[^$\\]|\\.)+?)\$\$"
    # None may contain its own opening: thousands of unclosed openings would each be matched to the end of the text.
    r"|(?<!\\)\\\[(?P<bracket>(?:[^\\]|\\(?![\[\]]).)+?)\\\]"
    # On one line only, and no digit after it: a dollar sign may be money.
    r"|(?<![\\\d$])\$(?P<inline>(?:[^$\\\n]|\\.)+?)\$(?!\d)"
    r"|(?<!\\)\\\((?P<parenthesis>(?:[^\\\n]|\\(?![()])[^\n])+?)\\\)"
)
# Several words in a formula: the dollar signs around them are money.
_SENTENCE = re.compile(r"(?<![\\{a-zA-Z])[a-z]{2,}\s+[a-z]{2,}\b")

_CURRENCY = r"(?:\\?\$|[€£¥₹₽₩₿])"
_DIGITS = (
    r"(?:[1-9]\d{0,2}(?:(?:[, ]|\{,\}|\\,)\d{3})++(?!\d)(?:\.\d++)?|\d++(?:,\d++){2,}+|\d++(?:[.,]\d++)?|\.\d++)"
    r"(?:[eE][+-]?\d{1,3}+(?!\w))?"
)
_BRACES = r"\{(?:[^{}\n]|\{(?:[^{}\n]|\{[^{}\n]{0,100}+\}){0,100}+\}){0,200}+\}"
_NO_MATHEMATICS = r"text\w*|math(?:rm|bf)|mbox|boxed|fbox|begin|end|item|q?quad|newline|par"
_COMMAND = rf"\\(?!(?:{_NO_MATHEMATICS})(?![a-zA-Z]))[a-zA-Z]++(?:\s?{_BRACES}|\[[^\[\]\n]{{0,40}}+\]){{0,4}}+"
_TEXT = r"\\(?:text|mbox|mathrm|textbf|mathbf)\s?\{(?!\s*(?:and|or)\b)[^{}\n]{0,60}+\}"
_FUNCTION = (
    r"(?:sqrt|cbrt|arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|pi|gcd|lcm|max|min|binom)(?![a-zA-Z])"
)
_SYMBOL = "[π∞√∛∜∅]"
_VULGAR = "[¼-¾⅐-⅞]"
_LETTER = r"(?<!['’])(?![aAI]\s+[\w(])[a-zA-Z](?:_(?:\{\w{1,8}\}|\w))?'{0,2}(?![a-zA-Z'’])"
_INSIDE = (
    rf"[^()\[\]{{}}a-zA-Z\n\\]|{_BRACES}|{_COMMAND}|{_FUNCTION}|(?<=\d)[a-zA-Z]{{2,3}}(?![a-zA-Z])|[a-zA-Z](?![a-zA-Z])"
)
_PARENTHESES = rf"[(\[](?:{_INSIDE}|\((?:{_INSIDE}){{1,100}}+\)){{1,200}}+[)\]]"
_SET = rf"\\?\{{(?:{_INSIDE}|\((?:{_INSIDE}){{1,100}}+\)){{1,200}}+\\?\}}"
_ABSOLUTE = r"\|[^|\n]{1,60}+\|"
_ATOM = (
    rf"(?:{_CURRENCY}?[-−+]?{_DIGITS}|{_COMMAND}|{_FUNCTION}|{_SYMBOL}|{_VULGAR}|{_LETTER}"
    rf"|{_PARENTHESES}|{_SET}|{_ABSOLUTE})"
)
_OPERATOR = (
    r"(?:[ \t]?(?:[<>!=]=|[-+−–*/^×·⋅÷=<>≤≥≠≈±∪∩⁄]"
    r"|\\(?:cdot|times|div|pm|l[et]q?|g[et]q?|neq?|approx|cup|cap|in)(?![a-zA-Z]))[ \t]?|:(?=\d)|[ ]x[ ](?=\d))"
)
_ATTACHED = (
    rf"[\^_]\s?(?:{_BRACES}|[-−]?\d++|[a-zA-Z]|{_COMMAND}|{_PARENTHESES})|!(?!=)|[²³¹⁰⁴-⁹⁺⁻ⁿ₀-₉°]|{_VULGAR}"
    rf"|(?:(?<![a-zA-Z])|(?<=[a-z]{{2}})){_DIGITS}|{_COMMAND}|{_SYMBOL}|{_FUNCTION}|{_PARENTHESES}|[a-zA-Zµ]{{1,3}}+(?![a-zA-Z])"
)
_AFTER_SPACE = (
    rf"[ ](?:{_COMMAND}|{_SYMBOL}|{_VULGAR}|pi\b|\d{{1,9}}/\d{{1,9}}(?!\w)|{_FUNCTION}(?=[ ]?\()"
    rf"|(?![ap]\.m\.){_LETTER}(?=\s*(?:[-+*/^=<>.,;)]|$)))|[ ]?{_TEXT}(?:\^\{{?[23]\}}?)?"
)
_EXPRESSION = (
    rf"(?:(?<=[\s=:(*\"'“`≈~>|{CJK}])|^)"
    rf"(?P<expression>(?:(?:minus|negative)[ ])?(?:[-−–+±][ ]?)?{_ATOM}"
    rf"(?>{_OPERATOR}[-−+±]?{_ATOM}|{_ATTACHED}|{_AFTER_SPACE})*+)"
)
_PERCENT = r"(?P<percent>\s*(?:\\?%|percent(?:age)?\b|pct\b))?"
_CANDIDATE = re.compile(rf"(?:{_FORMULA}|{_EXPRESSION}){_PERCENT}", re.DOTALL | re.MULTILINE)

_QUESTION = re.compile(r"[\s)*\"]{0,4}\?(?!\w)")
# What makes letters and brackets an expression.
_VALUE = re.compile(
    rf"\d|{_SYMBOL}|{_VULGAR}|\\(?:d?frac|sqrt|pi|infty|emptyset|varnothing|mathbb)|\w\s?[-+*/^=<>≤≥]|[a-zA-Z]\("
)
_LONG_EXPONENT = re.compile(r"\^([-−]\d+|\d{2,})")
_TIMES = re.compile(r"(?<=[\d)])[ ]?x[ ]?(?=[\d.(\\])")
# A letter of an equation, but not the unit after a digit.
_VARIABLE = re.compile(r"(?<![a-zA-Z\\])(?!(?<=\d)[gmslhL](?![a-zA-Z]))[a-zA-Z](?![a-zA-Z])")
# Not a longer expression that cannot be read, such as 8*(lambda: exit())().
_UNREAD = re.compile(r"[ ]?[*/^×·][ ]?[\w(\\]|\(|[.,]\d|\d")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A formula or expression that may be the answer, and its position."""

    start: int
    end: int
    text: str
    name: bool = False
    """It is the name of a variable."""
    computed: bool = False
    """It is the last side of a computation."""


def candidates(text: str, outside_formulas: bool = True) -> Iterator[Candidate]:
    """Yield the formulas of `text`, and the expressions outside them, in order; none that a question mark follows."""
    at = 0
    while match := _CANDIDATE.search(text, at):
        at = max(match.end(), match.start() + 1)
        if match["expression"] is None:
            inner = next(filter(None, match.group("display", "bracket", "inline", "parenthesis"))).strip()
            if match["inline"] and _SENTENCE.search(inner):
                at = match.start() + 1
            elif inner and not _QUESTION.match(text, match.end()):
                inner += r"\%" if match["percent"] else ""
                yield Candidate(match.start(), match.end(), inner, is_name(inner))
        elif outside_formulas and _VALUE.search(match["expression"]) and not _UNREAD.match(text, match.end()):
            found = _whole(text, match)
            at = max(at, found.end)
            if not _QUESTION.match(text, found.end):
                yield found


def _whole(text: str, match: re.Match[str]) -> Candidate:
    """Return an expression with the words and the unit that belong to it."""
    start, end = match.span()
    value = _last_side(_as_latex(match["expression"]))
    computed = "=" in match["expression"] and "=" not in value
    before = "" if computed else words_before(text, start)
    after = words_after(text, start, end)
    if before or after:
        percent = text[match.end("expression") : end]
        return Candidate(start - len(before), end + len(after), before + value + percent + after, computed=computed)
    if match["percent"]:
        return Candidate(start, end, value + r"\%", computed=computed)
    measured, end = with_unit(value, text, end)
    return Candidate(start, end, measured, not value[0].isdigit() and is_name(measured), computed)


def _as_latex(text: str) -> str:
    """Return `text` with dollar signs escaped, which outside formulas are money, and exponents in braces."""
    return _LONG_EXPONENT.sub(r"^{\1}", re.sub(r"(?<!\\)\$", r"\\$", text))


def _last_side(text: str) -> str:
    """Return the value of a computation: `75` of `50 + 25 = 75`, `x = 7` of `x = 3 + 4 = 7`; equations stay whole."""
    sides = [side.strip() for side in re.split(r"(?<![<>!=≤≥])=(?!=)", text)]
    if len(sides) == 1:
        return text
    if is_name(sides[0]):
        return f"{sides[0]} = {sides[-1]}"
    return text if _VARIABLE.search(_TIMES.sub(" * ", text)) else sides[-1]
