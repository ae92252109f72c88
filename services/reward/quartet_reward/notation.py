"""How an answer is written, as far as mathematics' meaning hangs on it: brackets, equations, units. Pure text."""

import re

_PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
_TOKENS = re.compile(r"\\[a-zA-Z]+|\\.|[^\\]", re.DOTALL)
_OPENING = frozenset(["(", "[", "{", r"\{", r"\langle"])
_CLOSING = frozenset([")", "]", "}", r"\}", r"\rangle"])
_EQUALS = frozenset(["="])
_RELATIONS = frozenset(
    ["<", ">", "≤", "≥", "≠", r"\le", r"\leq", r"\ge", r"\geq", r"\ne", r"\neq", r"\lt", r"\gt", r"\in", r"\approx"]
)
_SIZES = re.compile(r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big)(?![a-zA-Z])")
_NAME = re.compile(r"\\?[a-zA-Z]+(?:_(?:\{\w+\}|\w))?'*(?:\s*\(\s*\w(?:\s*,\s*\w)*\s*\))?")

_AND_OR = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-z]))\s*,?")
_ARGUMENTS = re.compile(r"(?<=\w)\([\w,]*\)$")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])|\\mp(?![a-zA-Z])")
# Constants set upright, which math-verify takes for units and drops.
_UPRIGHT = re.compile(r"\\(?:mathrm|operatorname)\s*\{\s*([ei])\s*\}")

# Words before the answer in its own box.
_LEAD_IN = re.compile(r"^\\text\s*\{[^{}\\]*(?:\bis|\bare|:|=)\s*\}\s*(?=\S)")

_FORMULA = re.compile(r"(?<![\\$])\$\$?[^$]+\$\$?")
_PROSE = re.compile(r"[A-Za-z\s.,:;'’!-]+")
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d+)", re.ASCII)

_QUANTITY = re.compile(
    r"(?P<number>[-+\d.,\s/^{}\\!]*(?:\\frac\{\d+\}\{\d+\})?[\d.}])\s*(?:\\[ ,;:!]|~|\s)*"
    r"(?P<unit>\\(?:text|mathrm|mbox|rm)\s*\{\s*[^{}\\]*\}|[a-zA-Zµ°]+)(?P<power>\^(?:\{?[23]\}?))?\.?"
)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|rm)\s*\{([^{}\\]*)\}")
_UNIT_NAMES = {
    "m": "m meter meters metre metres", "km": "km kilometer kilometers kilometre kilometres",
    "cm": "cm centimeter centimeters centimetre centimetres", "mm": "mm millimeter millimeters millimetres",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "s": "s sec secs second seconds", "min": "min mins minute minutes", "h": "h hr hrs hour hours",
    "day": "day days", "week": "week weeks", "month": "month months", "year": "yr yrs year years",
    "g": "g gram grams", "kg": "kg kilogram kilograms", "mg": "mg milligram milligrams", "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces", "l": "l L liter liters litre litres", "ml": "ml mL milliliter milliliters",
    "dollar": "dollar dollars", "cent": "cent cents",
}  # fmt: skip
_CANONICAL_UNIT = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}

# The names of units that a number in prose may carry; "in" is a word far more often than an inch.
UNIT_WORDS = frozenset(_CANONICAL_UNIT) - {"in"}


def without_decoration(text: str) -> str:
    """Return `text` without math delimiters, bracket sizes and a full stop at the end."""
    text = _UPRIGHT.sub(_upright, _SIZES.sub("", text.strip())).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(opening) : -len(closing)]
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            # "$5 and $6" starts and ends alike but is no single formula.
            return inner.strip() if opening not in inner and closing not in inner else text
    text = _LEAD_IN.sub("", text)
    return text.removesuffix(".").rstrip() if not text.endswith("..") else text


def _upright(match: re.Match[str]) -> str:
    before = " " if match.string[: match.start()][-1:].isalpha() else ""
    return before + match[1] + (" " if match.string[match.end() :][:1].isalpha() else "")


def formula_in_prose(text: str) -> str:
    """Return the only formula of `Therefore $x > 5$ is the solution`, if words are around it; else `text`."""
    formulas = list(_FORMULA.finditer(text))
    if len(formulas) != 1:
        return text
    formula = formulas[0]
    prose = text[: formula.start()] + text[formula.end() :]
    return formula[0].strip("$") if prose.strip() and _PROSE.fullmatch(prose) else text


def with_decimal_point(text: str) -> str | None:
    """Return `1.22` for `1,22`; None if there is no decimal comma (that of `1,225` separates thousands)."""
    match = _DECIMAL_COMMA.fullmatch(text.strip())
    return f"{match[1]}.{match[2]}" if match and len(match[2]) != 3 else None


def split_outside_brackets(text: str, separators: frozenset[str]) -> list[str]:
    """Split at those of `separators` (single tokens) that stand outside all brackets and braces."""
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


def bracketed_list(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets and elements of `(a, b)`, `[a, b)`, `\\{a, b\\}`…: two elements or more, or None.

    The brackets come as their two tokens joined, e.g. "()", "[)", "\\{\\}".
    """
    tokens = [token[0] for token in _TOKENS.finditer(text)]
    if len(tokens) < 3 or tokens[0] not in _PAIRS or tokens[-1] not in _PAIRS.values():
        return None
    depth = 0
    for position, token in enumerate(tokens):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and position < len(tokens) - 1:
            return None  # "(1,2) \cup (3,4)" is not one list
    elements = split_outside_brackets(text[len(tokens[0]) : -len(tokens[-1])], frozenset([","]))
    return (tokens[0] + tokens[-1], elements) if len(elements) > 1 else None


def sides_of_equation(text: str) -> list[str]:
    """Return the sides of `a = b = …`; only one if `text` is no equation, has other relations or several parts."""
    tokens = {token[0] for token in _TOKENS.finditer(text)}
    if (
        "=" not in tokens
        or "!=" in text
        or tokens & _RELATIONS
        or len(split_outside_brackets(text, frozenset([",", ";"]))) > 1
    ):
        return [text]
    return split_outside_brackets(text, _EQUALS)


def value_of_chain(text: str) -> str:
    """Return `x = 2` for `x = 1 + 1 = 2`, a reference with its working; any other text as it is."""
    sides = sides_of_equation(text)
    if len(sides) < 3:
        return text
    return f"{sides[0]} = {sides[-1]}" if is_name(sides[0]) else sides[-1]


def value_of(reference: str, left: str) -> str | None:
    """Return what an equation whose left side is `left` must say to give `reference`; None if that is no value.

    That is the reference itself, and 7 for the reference `x = 7` if `left` is `x` too.
    """
    sides = sides_of_equation(reference)
    if len(sides) == 1:
        return None if "=" in reference else reference
    if len(sides) == 2 and is_name(sides[0]) and "".join(sides[0].split()) == "".join(left.split()):
        return sides[1]
    return None


def without_approximation(text: str) -> str:
    """Return `1/3` for `1/3 \\approx 0.333`, and `x = 11` for `x \\approx 11`."""
    parts = split_outside_brackets(text.replace("≈", r"\approx "), frozenset([r"\approx"]))
    if len(parts) == 1 or not all(parts):
        return text
    return f"{parts[0]} = {parts[1]}" if len(parts) == 2 and is_name(parts[0]) else parts[0]


def without_group(text: str) -> str:
    """Return `1, 2` for `{1, 2}` and for `{{1, 2}}`: TeX does not print these braces."""
    text = text.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return text
    tokens = [token[0] for token in _TOKENS.finditer(text) if not token[0].isspace()]
    leading = next((i for i, token in enumerate(tokens) if token != "{"), len(tokens))
    trailing = next((i for i, token in enumerate(reversed(tokens)) if token != "}"), len(tokens))
    depth, lowest = leading, leading
    for token in tokens[leading : len(tokens) - trailing]:
        depth += (token == "{") - (token == "}")
        lowest = min(lowest, depth)
    for _ in range(min(lowest, trailing)):
        text = text[1:-1].strip()
    return text


def with_braces(text: str, as_set: bool) -> str:
    """Return `\\{1, 2\\}` (a set) or `1, 2` (what TeX prints) for `{1, 2}`; any other text as it is."""
    inner = without_group(text)
    if inner == text:
        return text
    listed = len(split_outside_brackets(inner, frozenset([","]))) > 1
    return rf"\{{{inner}\}}" if as_set and listed else inner


def solutions(text: str) -> tuple[str, str] | None:
    """Return the name and the values of `x = 1 or x = 2 \\pm \\sqrt{3}`: several equations of one name; else None.

    The values come as one list, with both signs written out: `1, 2 + \\sqrt{3}, 2 - \\sqrt{3}`.
    """
    parts = split_outside_brackets(_AND_OR.sub(",", text), frozenset([",", ";", r"\quad"]))
    equations = [sides_of_equation(part) for part in parts if part]
    if len(equations) < 2 and not _PLUS_MINUS.search(text):
        return None
    if any(len(sides) != 2 for sides in equations) or not is_name(equations[0][0]):
        return None
    # W(n) and W(x) are the same function.
    names = {_ARGUMENTS.sub("", "".join(sides[0].split())) for sides in equations}
    if len(names) > 1:
        return None
    return names.pop(), ", ".join(value for sides in equations for value in _with_both_signs(sides[1]))


def _with_both_signs(text: str) -> list[str]:
    if not _PLUS_MINUS.search(text):
        return [text]
    upper, lower = {r"\pm": " + ", r"\mp": " - "}, {r"\pm": " - ", r"\mp": " + "}
    return [_PLUS_MINUS.sub(lambda match: upper[match[0]], text), _PLUS_MINUS.sub(lambda match: lower[match[0]], text)]


def is_name(text: str) -> bool:
    """Return True for what an equation may define: `x`, `x_1`, `f(x)`, `\\alpha`, `(x, y)`."""
    listed = bracketed_list(text.strip())
    names = [text] if listed is None else listed[1]
    return all(_NAME.fullmatch(_TEXT.sub(r"\1", name).strip()) for name in names)


def known_unit(text: str) -> str | None:
    """Return the canonical unit of `5 km` or `5\\text{ meters}^2`, or None if it has none that is known."""
    quantity = quantity_of(text)
    return None if quantity is None else quantity[1]


def quantity_of(text: str) -> tuple[str, str] | None:
    """Return the number and the canonical unit of `5 km` or `5\\text{ meters}^2`, or None if it is no quantity."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        return None
    named = _TEXT.fullmatch(match["unit"])
    unit = (named[1] if named else match["unit"]).strip()
    canonical = _CANONICAL_UNIT.get(unit) or _CANONICAL_UNIT.get(unit.lower())
    power = re.sub(r"\D", "", match["power"] or "")
    return None if canonical is None else (match["number"].strip(), canonical + power)
