"""Quantities: a number and what it counts or measures."""

import re

_NAMES = {
    "m": "m meter metre", "km": "km kilometer kilometre", "cm": "cm centimeter centimetre",
    "mm": "mm millimeter millimetre", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "year": "year yr",
    "g": "g gm gram", "kg": "kg kilogram", "mg": "mg milligram", "lb": "lb lbs pound", "oz": "oz ounce",
    "l": "l L liter litre", "ml": "ml mL milliliter millilitre", "degree": "degree deg",
    "dollar": "dollar USD", "percent": "% percent percentage pct",
    "mph": "mph mi/h", "km/h": "km/h kmh kph kmph", "m/s": "m/s", "day": "day", "week": "week", "month": "month",
    "cent": "cent", "am": "am a.m. a.m", "pm": "pm p.m. p.m",
}  # fmt: skip
_CANONICAL = {name: unit for unit, names in _NAMES.items() for name in names.split()}

# The names of units that a number in prose may carry; "in" is a word far more often than an inch.
UNIT_WORDS = frozenset(f"{name}{end}" for name in _CANONICAL if name != "%" for end in ("", "s")) - {"in"}

_NUMBER = r"(?P<number>[-+]?[\d.][-+\d.,\s/^{}:]*|.*[\d})\]]|.*\\pi)"
_TEXT_UNIT = re.compile(
    rf"{_NUMBER}\s*\\text\s*\{{(?P<unit>[^{{}}\\\d()=<>:;?]+)\}}\s*(?:\^\{{?(?P<power>\d)\}}?)?", re.DOTALL
)
# A single letter is a unit only where a space parts it from the number, for 5m may be a product.
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
    """Return the number and the canonical unit of `5 km`, `\\$5`, `90^\\circ`, `50\\%`, `52_8`; None if it is none."""
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
    """Return True if both name the same: the same words, or the one with further words about it ("red apples")."""
    words = set(one.split()), set(two.split())
    return words[0] <= words[1] or words[1] <= words[0]


def canonical_unit(text: str, power: str = "") -> str | None:
    """Return the unit's own name: `m2` for "square meters"; None if it is none."""
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
    """Return True for a known unit, and for what is too long to be a product of variables."""
    return _canonical_word(word) in _NAMES or len(word) > 3


def _canonical_word(word: str) -> str:
    for form in (word, word.lower(), word.lower().removesuffix("s")):
        if form in _CANONICAL:
            return _CANONICAL[form]
    return word.lower().removesuffix("s")
