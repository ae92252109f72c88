"""Normalizes the spelling of LaTeX and Unicode mathematics; splits brackets; reads quantities and units. Text only."""

import re
from fractions import Fraction

_TOKENS = re.compile(r"\\[a-zA-Z]+|\\.|[^\\]", re.DOTALL)
_PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
_OPENING = frozenset(["(", "[", "{", r"\{", r"\langle", r"\begin"])
_CLOSING = frozenset([")", "]", "}", r"\}", r"\rangle", r"\end"])

# Characters that look like ASCII ones or have a command, and invisible ones, but not those that reverse the direction.
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", ""),
        **dict.fromkeys("−–﹣－", "-"),
        **{chr(code): chr(code - 0xFEE0) for code in (*range(0xFF10, 0xFF1A), 0xFF05, 0xFF0E, 0xFF0F)},
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "°": r"^\circ ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "∓": r"\mp ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
    }
)
_SEVERAL_SPELLINGS = re.compile(r"[\\=~{]|\s\s|[\t\n]")
_FUNCTIONS = "arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp|gcd|lcm|det"
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\(?:left|right|middle|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])", ""),
        # "32,\! 349" prints as 32,349: the negative space cancels the space after the comma.
        (r",\\!\s*(?=\d{3}(?!\d))|\{,\}", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|\s+", " "),
        (r"\\(?:d|t|c)frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\\pi|\w)\s*(?=[\w{\\])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\\pi|\w)", r"\1{\2}"),
        (r"\\(le|ge|ne)(?:q|qq|qslant)(?![a-zA-Z])", r"\\\1"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"(?<=\s)!=", r"\\ne "),  # but 5!=120 is a factorial
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\(?:mid|vert)(?![a-zA-Z])", "|"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", r"^\\circ"),
        # Upright constants, which math-verify would drop as units.
        (r"(?<=[a-zA-Z])\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}", r" \1"),
        (r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}(?=[a-zA-Z])", r"\1 "),
        (r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}", r"\1"),
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
# In lists and brackets a comma may separate elements instead.
_THOUSANDS = re.compile(r"(?<![\d,.\w])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", re.ASCII)
_THOUSANDS_IN_BRACES = re.compile(r"(?<=\{)\s*[1-9]\d{0,2}(?:,\d{3})+\s*(?=\})", re.ASCII)
# Words before the answer inside its box.
_LEAD_IN = re.compile(r"^\\text\s*\{[^{}\\]*(?:\bis|\bare|:|=)\s*\}\s*(?=\S)")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_FORMULA = re.compile(r"(?<![\\$])\$\$?[^$]+\$\$?")
_PROSE = re.compile(r"[A-Za-z\s.,:;'’!-]+")

_SUBSCRIPT = r"(?:_(?:\{[^{}]*\}|\\?[a-zA-Z]+|\w))?"
_SYMBOL = rf"(?:m?\\angle\s*)?(?:\\(?:overline|vec|hat|bar|text)\s*\{{[^{{}}]*\}}|\\?[a-zA-Z]+){_SUBSCRIPT}'*"
_NAME = re.compile(
    rf"{_SYMBOL}(?:\s*\(\s*\w+(?:\s*[,|]\s*\w+)*\s*\)|(?:\s*[:/]\s*{_SYMBOL})+)?|\|[A-Z]+\|"
    rf"|\\frac\{{{_SYMBOL}\}}\{{{_SYMBOL}\}}"
)
_NO_NAMES = frozenset([r"\pi", r"\infty", r"\emptyset"])


def plain(text: str) -> str:
    """Return `text` without delimiters and decoration, normalized: `\\frac` for `\\dfrac`, `-` for an en dash…"""
    text = undelimited(_only_formula(text.strip())).translate(_CHARACTERS)
    for pattern, spelling in _SPELLINGS if _SEVERAL_SPELLINGS.search(text) else ():
        text = pattern.sub(spelling, text)
    if lines := _LINES.fullmatch(text.strip()):
        text = _as_one_line(lines)
    text = _REPEATING.sub(_as_fraction, _LEAD_IN.sub("", text.strip()))
    thousands = _THOUSANDS_IN_BRACES if re.search(r"[(\[]|\\\{", text) else _THOUSANDS
    if "," in text:
        text = thousands.sub(lambda match: match[0].replace(",", ""), text)
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def undelimited(text: str) -> str:
    """Return `x` for `$x$`, `\\[x\\]` and the like, if one pair of delimiters encloses all."""
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            # "$5$ and $6$" is not one formula.
            return inner.strip() if opening not in inner and closing not in inner else text
    return text


def tokens(text: str) -> tuple[str, ...]:
    """Return the tokens of `text`, without spaces and the braces around a single sub- or superscript."""
    text = re.sub(r"(?<=[\^_])\{(\w)\}", r"\1", text)
    return tuple(token[0] for token in re.finditer(r"\\[a-zA-Z]+|\\.|\d+|\S", text, re.DOTALL))


def split_outside_brackets(text: str, separators: frozenset[str]) -> list[str]:
    """Split at the `separators` (single tokens) outside all brackets and braces."""
    parts, depth, start = [], 0, 0
    for token in _TOKENS.finditer(text):
        if token[0] in _OPENING:
            depth += 1
        elif token[0] in _CLOSING:
            depth -= 1
        elif depth == 0 and token[0] in separators:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*(part.strip() for part in parts), text[start:].strip()]


def bracketed(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets and elements of `(a, b)`, `[a, b)`, `\\{a\\}`, or None if no single pair encloses all.

    The brackets are returned as their two tokens joined, e.g. "()", "[)", "\\{\\}".
    """
    found = [token[0] for token in _TOKENS.finditer(text)]
    if len(found) < 3 or found[0] not in _PAIRS or found[-1] not in _PAIRS.values():
        return None
    depth = 0
    for position, token in enumerate(found):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and position < len(found) - 1:
            return None  # e.g. (1,2) \cup (3,4)
    inside = text[len(found[0]) : -len(found[-1])]
    elements = split_outside_brackets(inside, frozenset([";"]))
    return found[0] + found[-1], elements if len(elements) > 1 else split_outside_brackets(inside, frozenset([","]))


def without_group(text: str) -> str:
    """Return `1, 2` for `{1, 2}` and for `{{1, 2}}`: TeX does not print these braces."""
    found = [token[0] for token in _TOKENS.finditer(text) if not token[0].isspace()]
    leading = next((i for i, token in enumerate(found) if token != "{"), len(found))
    trailing = next((i for i, token in enumerate(reversed(found)) if token != "}"), len(found))
    depth = lowest = leading
    for token in found[leading : len(found) - trailing]:
        depth += (token == "{") - (token == "}")
        lowest = min(lowest, depth)
    for _ in range(min(lowest, trailing)):
        text = text.strip()[1:-1].strip()
    return text


def is_name(text: str) -> bool:
    """Return whether an equation may define it: `x`, `m_{\\max}`, `f(x)`, `\\alpha`, `(x, y)`."""
    listed = bracketed(text.strip())
    names = listed[1] if listed and len(listed[1]) > 1 else [text]
    return all(_NAME.fullmatch(name.strip()) and name.strip() not in _NO_NAMES for name in names)


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
    whole, fixed, repeated = match[1] or "0", match[2], match[3] or match[4]
    value = Fraction(int(whole + fixed + repeated) - int(whole + fixed), 10 ** len(fixed) * (10 ** len(repeated) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_UNIT_NAMES = {
    "m": "m meter metre", "km": "km kilometer kilometre", "cm": "cm centimeter centimetre",
    "mm": "mm millimeter millimetre", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "year": "year yr",
    "g": "g gm gram", "kg": "kg kilogram", "mg": "mg milligram", "lb": "lb lbs pound", "oz": "oz ounce",
    "l": "l L liter litre", "ml": "ml mL milliliter millilitre", "degree": "degree deg",
    "dollar": "dollar USD", "percent": "% percent percentage pct",
    "mph": "mph mi/h", "km/h": "km/h kmh kph kmph", "m/s": "m/s", "day": "day", "week": "week", "month": "month",
    "cent": "cent", "am": "am a.m. a.m", "pm": "pm p.m. p.m",
}  # fmt: skip
_CANONICAL = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}

# Names of units after a number in prose, except "in", which is rarely an inch.
UNIT_WORDS = frozenset(f"{name}{end}" for name in _CANONICAL if name != "%" for end in ("", "s")) - {"in"}

_QUANTITY_NUMBER = r"(?P<number>[-+]?[\d.][-+\d.,\s/^{}:]*|.*[\d})\]]|.*\\pi)"
_TEXT_UNIT = re.compile(
    rf"{_QUANTITY_NUMBER}\s*\\text\s*\{{(?P<unit>[^{{}}\\\d()=<>:;?]+)\}}\s*(?:\^\{{?(?P<power>\d)\}}?)?", re.DOTALL
)
# A single letter is a unit only after a space: 5m may be a product.
_BARE_UNIT = re.compile(
    r"(?P<number>[-+]?(?:\d[\d.,:/ ]*|\.\d+|\\frac\{\d+\}\{\d+\}))"
    r"\s*(?P<unit>(?:(?<=\s)[a-zA-Z]|[a-zA-Z.]{2,})(?:[/ ][a-zA-Z. ]+)*)\s*(?:\^\{?(?P<power>[23])\}?)?"
)
_SIGNED = re.compile(r"(?P<sign>-?)\s*(?:\\?\$|(?P<currency>[€£¥₹₽₩₿]))\s*(?P<number>[^$]*\d[^$]*)")
_TRAILING = re.compile(r"(?P<number>.*[\w})])\s*(?P<unit>\^\\circ|\\?%)\s*(?:\\text\s*\{\s*)?(?P<scale>[CF]?)\s*\}?")
_BASED = re.compile(r"(?P<number>\d[\dA-F]{0,40})\s*_\s*(?:\{(?P<base>\d{1,2})\}|(?P<digit>\d{1,2}))", re.ASCII)
_NO_UNIT = frozenset(
    re.findall(r"\w+", "is are not but to for if and or where when with than x sin cos tan log ln pi sqrt mod")
)


def quantity(text: str) -> tuple[str, str] | None:
    """Return the number and the canonical unit of `5 km`, `\\$5`, `90^\\circ`, `50\\%`, `52_8`; else None."""
    if match := _BASED.fullmatch(text):
        return match["number"].lstrip("0") or "0", f"base {match['base'] or match['digit']}"
    if match := _SIGNED.fullmatch(text):
        return match["sign"] + match["number"], match["currency"] or "dollar"
    if match := _TRAILING.fullmatch(text):
        return match["number"], "percent" if "%" in match["unit"] else f"degree {match['scale']}".rstrip()
    match = _TEXT_UNIT.fullmatch(text) if "\\text" in text else _BARE_UNIT.fullmatch(text)
    if match is None or "\\text" in match["number"]:
        return None
    if "\\text" not in text and not any(map(_is_word, match["unit"].split())):
        return None
    unit = canonical_unit(match["unit"], match["power"] or "")
    return None if unit is None else (match["number"].strip(), unit)


def same_unit(one: str, two: str) -> bool:
    """Return whether two units are the same, or one has additional words ("red apples")."""
    words = set(one.split()), set(two.split())
    return words[0] <= words[1] or words[1] <= words[0]


def canonical_unit(text: str, power: str = "") -> str | None:
    """Return a unit's canonical name, e.g. `m2` for "square meters"; None if it is not a unit."""
    words = text.replace("-", " ").strip().rstrip(".,").split()
    if not words or _NO_UNIT.intersection(words):
        return None
    names, exponent = [], power
    for word in words:
        bare = word.rstrip(".")
        if bare.lower() in ("square", "sq", "squared"):
            exponent = "2"
        elif bare.lower() in ("cubic", "cu", "cubed"):
            exponent = "3"
        elif bare not in ("of", "the"):
            names.append(_canonical_word(word))
    name = " ".join(names).replace("mi per h", "mph").replace("km per h", "km/h").replace("m per s", "m/s")
    return (name or "unit") + exponent


def _is_word(word: str) -> bool:
    """Return whether it is a known unit, or too long to be a product of variables."""
    return _canonical_word(word) in _UNIT_NAMES or len(word) > 3


def _canonical_word(word: str) -> str:
    for form in (word, word.lower(), word.lower().removesuffix("s")):
        if form in _CANONICAL:
            return _CANONICAL[form]
    return word.lower().removesuffix("s")
