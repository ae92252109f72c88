"""Reads number words: `5 million`, `three dozen`, `two and a half`, `minus seven`, `two thirds`, `1万`. Text only."""

import re
from collections.abc import Iterable
from fractions import Fraction

_DIGITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15}
# What may follow digits or a number in words, and multiplies it.
_SCALES = {
    "dozen": 12, "score": 20, "hundred": 100, "gross": 144, "lakh": 10**5, "crore": 10**7, **_LARGE,
    "百": 100, "千": 1000, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8,
}  # fmt: skip
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000,
}  # fmt: skip
_VALUES = {
    **{word: value for value, word in enumerate(["zero", *_DIGITS, *_TEENS])},
    **{word: 10 * value for value, word in enumerate(_TENS, 2)},
    "a": 1,
    "an": 1,
}

NUMBER_WORDS = frozenset([*_VALUES, *_SCALES, *_PARTS, "minus", "negative"]) - {"a", "an"}


def _one_of(words: Iterable[str]) -> str:
    return "(?:" + "|".join(words) + ")"


_BELOW_100 = rf"(?:{_one_of(_TENS)}(?:[ -]{_one_of(_DIGITS)})?|{_one_of([*_TEENS, *_DIGITS, 'zero'])})"
_BELOW_1000 = rf"(?:(?:{_one_of(_DIGITS)}|a) hundred(?:(?: and)? {_BELOW_100})?|{_BELOW_100})"
_THOUSANDS = rf"(?:{_BELOW_1000}|a) {_one_of(_LARGE)}"
_IN_WORDS = rf"(?:{_THOUSANDS}(?:,? (?:and )?(?={_BELOW_1000})|\b))+(?:{_BELOW_1000})?|{_BELOW_1000}"
_PART = rf"{_one_of(_PARTS)}s?"
_NUMBER = re.compile(
    r"(?:(?P<sign>minus|negative) ?)?(?:"
    rf"(?P<alone>half)(?: of)?(?: an?)?\b"
    rf"|(?:(?P<whole>\d+(?:\.\d+)?)|(?P<words>{_IN_WORDS}\b|a(?= {_one_of(_SCALES)}|n? {_one_of(_PARTS)})))"
    rf"(?P<scales>(?: ?{_one_of(_SCALES)}s?(?![a-z]))*)"
    rf"(?:[ -](?P<part>{_PART})\b(?: of)?(?: an?\b)?| and (?P<count>an?|{_one_of(_DIGITS)})[ -](?P<rest>{_PART})\b)?)"
)


def leading_number(text: str) -> tuple[Fraction, int] | None:
    """Return the value of the number in words that `text` begins with, and its length; None if it begins with none.

    `text`: lower case, single spaces. Digits count if number words follow them.
    """
    match = _NUMBER.match(text)
    if match is None or text[match.end() : match.end() + 1].isalnum() and text[match.end()].isascii():
        return None
    if match["alone"]:
        value = Fraction(1, 2)
    else:
        value = Fraction(match["whole"]) if match["whole"] else _value(match["words"])
        for scale in re.findall(_one_of(_SCALES), match["scales"] or ""):
            value *= _SCALES[scale]
        if match["part"]:
            value *= _part(match["part"])
        elif match["rest"]:
            value += _VALUES[match["count"]] * _part(match["rest"])
    return (-value if match["sign"] else value), match.end()


_SUFFIXED = re.compile(
    r"(?:\\?\$)?(\d+(?:,\d{3})*(?:\.\d+)?) ?(?:(k)|\^?\{?(?:\\(?:text|mathrm) ?\{)? ?(st|nd|rd|th)\}{0,2})", re.ASCII
)


def suffixed_number(text: str) -> str | None:
    """Return the number that `4th`, `4^{\\text{th}}` or `70k` says; None for other text."""
    match = _SUFFIXED.fullmatch(text)
    if match is None:
        return None
    number = match[1].replace(",", "")
    if match[2]:
        return str(value) if (value := Fraction(number) * 1000).denominator == 1 else None
    ending = "th" if number[-2:-1] == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")
    return number if match[3] == ending and number.isdigit() else None


def _part(word: str) -> Fraction:
    return Fraction(1, _PARTS[word if word in _PARTS else word.removesuffix("s")])


def _value(text: str) -> Fraction:
    """Return the value of a number in words, e.g. "one hundred and five thousand, two hundred and six"."""
    total, current = 0, 0
    for word in re.findall(r"[a-z]+", text):
        if word in _LARGE:
            total, current = total + (current or 1) * _LARGE[word], 0
        elif word == "hundred":
            current = (current or 1) * 100
        elif word != "and":
            current += _VALUES[word]
    return Fraction(total + current)
