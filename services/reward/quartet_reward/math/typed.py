"""Spells typed notation as LaTeX: Unicode (`√2`, `x²`, `１`), Python's and calculators' (`x**2`, `sqrt(3)`)."""

import re
import unicodedata

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙₖᵢⱼ", "0123456789+-()nkij", strict=True))
_VULGAR = {
    character: r"\frac{{{}}}{{{}}}".format(*parts)
    for character in map(chr, range(0xBC, 0x2190))
    if unicodedata.decomposition(character).startswith("<fraction>")
    and all(parts := unicodedata.normalize("NFKC", character).split("\u2044"))
}
_NAMES_OF_LETTERS = """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi psi omega
    phi epsilon Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
_GREEK = dict(zip("αβγδεζηθικλμνξπρστφχψωϕϵΓΔΘΛΞΠΣΦΨΩ", _NAMES_OF_LETTERS.split(), strict=True))
FULL_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
# Characters that look like ASCII ones or have a command, and invisible ones, but not those that reverse the direction.
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", ""),
        **FULL_WIDTH,
        **dict.fromkeys("−–﹣", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000", " "),
        **dict.fromkeys("\u2044∕÷", "/"),
        **{character: rf"\mathbb{{{unicodedata.normalize('NFKC', character)}}}" for character in "ℝℤℕℚℂ"},
        **_VULGAR,
        **{letter: rf"\{name} " for letter, name in _GREEK.items()},
        "。": ".", "、": ",", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*",
        "∞": r"\infty ", "°": r"^\circ ", "º": r"^\circ ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ",
        "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "∉": r"\notin ", "⊂": r"\subset ", "⊆": r"\subseteq ", "∖": r"\setminus ", "∅": r"\emptyset ",
        "∠": r"\angle ", "△": r"\triangle ", "′": "'", "’": "'", "⟨": r"\langle ", "⟩": r"\rangle ",
        "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "→": r"\to ", "∑": r"\sum ",
        "∏": r"\prod ", "∫": r"\int ",
    }
)  # fmt: skip
_SCRIPTS = (
    (re.compile(f"[{''.join(_SUPERSCRIPTS)}]+"), "^", str.maketrans(_SUPERSCRIPTS)),
    (re.compile(f"[{''.join(_SUBSCRIPTS)}]+"), "_", str.maketrans(_SUBSCRIPTS)),
)
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_UNDER_ROOT = r"\s*(\d+(?:\.\d+)?|\\?[a-zA-Z]+)"

# Not part of a command or a longer word.
_FREE = r"(?<![a-zA-Z\\])"
_NAMED = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log"
_LETTERS = "alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi|omega"
_TYPED = re.compile(
    rf"\*\*|\^(?:\(|-|\d\d)|{_FREE}(?:sqrt|cbrt|exp|abs|pi|inf|infty|infinity|oo|{_NAMED}|asin|acos|atan|{_LETTERS})(?![a-zA-Z])|C\(\d|\d\s*x\s*10|[\])]\s*U\s*[\[(]|\\sqrt(?:\[\d\])?\s*\("
)
# Words in these are words.
_UPRIGHT = re.compile(r"(\\(?:text[a-z]*|mathrm|mbox)\s*\{[^{}]*\})")
_CALLED = re.compile(
    rf"{_FREE}(?P<name>sqrt|cbrt|exp|abs)\s*\(|(?P<power>\*\*|\^)\s*\(|(?P<root>\\sqrt(?:\[\d\])?)\s*\("
)
_CALLS = {"sqrt": (r"\sqrt{", "}"), "cbrt": (r"\sqrt[3]{", "}"), "exp": ("e^{", "}"), "abs": ("|", "|")}
_WORDS = (
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))"), r" \\times "),
    (re.compile(rf"{_FREE}a(sin|cos|tan)(?=\s*\()"), r"\\arc\1 "),
    (re.compile(rf"{_FREE}sqrt(\d+)"), r"\\sqrt{\1}"),
    (re.compile(r"(,[^,()\[\]]*[\])])\s*U\s*(?=[\[(][^,()\[\]]*,)"), r"\1 \\cup "),
    (re.compile(rf"{_FREE}({_NAMED})(?=\s*[\s(\d^])(?!\s*$)"), r"\\\1 "),
    (re.compile(rf"{_FREE}pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(rf"{_FREE}({_LETTERS})(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(rf"{_FREE}C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)"), r"\\binom{\1}{\2}"),
    (re.compile(rf"{_FREE}(?:inf|infty|infinity|oo)(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"\*\*\s*(-?\d+(?:\.\d+)?|[a-zA-Z])"), r"^{\1}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\^(-\d+|\d\d+)"), r"^{\1}"),
)


def typed_as_latex(text: str) -> str:
    """Return `text` with Unicode characters and typed notation as LaTeX."""
    if not text.isascii():
        text = _unicode_as_latex(text)
    if not _TYPED.search(text):
        return text
    return "".join(part if index % 2 else _python_as_latex(part) for index, part in enumerate(_UPRIGHT.split(text)))


def _unicode_as_latex(text: str) -> str:
    for pattern, mark, characters in _SCRIPTS:
        text = pattern.sub(lambda match: f"{mark}{{{match[0].translate(characters)}}}", text)  # noqa: B023
    for character, command in _ROOTS.items():
        text = re.sub(character + _UNDER_ROOT, lambda match: f"{command}{{{match[1]}}}", text)  # noqa: B023
        text = text.replace(character, f"{command} ")
    return text.translate(_CHARACTERS)


def _python_as_latex(text: str) -> str:
    position = 0
    while match := _CALLED.search(text, position):
        end = _closing(text, match.end() - 1)
        if end is None:
            break
        opening, closing = _CALLS[match["name"]] if match["name"] else ((match["root"] or "^") + "{", "}")
        text = f"{text[: match.start()]}{opening}{text[match.end() : end]}{closing}{text[end + 1 :]}"
        position = match.start() + len(opening)
    for pattern, spelling in _WORDS:
        text = pattern.sub(spelling, text)
    return text


def _closing(text: str, opening: int) -> int | None:
    """Return the position of the parenthesis that closes the one at `opening`, or None."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    return None
