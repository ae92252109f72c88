"""Splits LaTeX into tokens, brackets and elements, and tells names from values. Text only."""

import re
from functools import lru_cache

_TOKENS = re.compile(r"\\[a-zA-Z]+|\\.|[^\\]", re.DOTALL)
_PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
_OPENING = frozenset(["(", "[", "{", r"\{", r"\langle", r"\begin"])
_CLOSING = frozenset([")", "]", "}", r"\}", r"\rangle", r"\end"])

_SUBSCRIPT = r"(?:_(?:\{[^{}]*\}|\\?[a-zA-Z]+|\w))?"
_SYMBOL = (
    rf"(?:m?\\angle\s*)?(?:\\(?:overline|vec|hat|bar|text)\s*\{{[^{{}}]*\}}|\\?[a-zA-Z]+){_SUBSCRIPT}'*(?:\^\{{-1\}})?"
)
_NAME = re.compile(
    rf"{_SYMBOL}(?:\s*\(\s*\w+(?:\s*[,|]\s*\w+)*\s*\)|(?:\s*[:/]\s*{_SYMBOL})+)?|\|[A-Z]+\|"
    rf"|\\frac\{{{_SYMBOL}\}}\{{{_SYMBOL}\}}"
)
_NO_NAMES = frozenset([r"\pi", r"\infty", r"\emptyset"])


@lru_cache(maxsize=4096)
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
