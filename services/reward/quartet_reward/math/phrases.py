"""Finds the words and the unit that belong to a number in prose: "5 million", "5 feet 6 inches", "at least 5"."""

import re

from quartet_reward.math.numerals import NUMBER_WORDS
from quartet_reward.math.quantities import UNIT_WORDS
from quartet_reward.math.words import CJK

_ATTACHED_UNIT = re.compile(
    r"(?P<number>.*[\d}])(?P<space>[ ]?)(?P<unit>[A-Za-zµ]{1,3})(?P<power>\^[23]|[²³])?", re.DOTALL
)
_UNIT = r"(?:[ap]\.m\.|[A-Za-zµ]+(?:/[hs])?)(?![\w-])"
_UNITS = re.compile(
    rf"\s?(?P<unit>(?:(?:square|cubic|sq\.?|cu\.?|light|nautical)[ -]){{0,2}}(?P<first>{_UNIT})"
    rf"(?:(?:[ ]per[ ]|[ ]?/[ ]?)(?:(?:square|cubic)[ ])?(?P<second>{_UNIT}))?)(?P<power>[²³]|\^[23])?"
)
# "5 feet 6 inches"
_SMALLER_UNIT = re.compile(rf"(?:,|,?[ ]and)?[ ]\d+(?:\.\d+)?[ ]?(?P<unit>{_UNIT})")
_RARELY_UNITS = frozenset(["in", "ins", "A", "a"])
_POWERS = {"²": "^2", "³": "^3"}

# Not the quarters that are coins.
_NUMBER_WORD = rf"(?:{'|'.join(sorted(NUMBER_WORDS - {'quarter', 'minus', 'negative'}))})s?"
_OPERAND = rf"(?=[ ](?:-?\d|[a-z](?![a-z])|\\|{_NUMBER_WORD}\b))"
_MORE = "(?:more|less|fewer|greater|higher|lower)"
_CHANGE = re.compile(
    rf"(?:{_NUMBER_WORD}|squared|cubed|factorial|negative|(?:times|plus|minus|over|root|base){_OPERAND}|"
    r"divided|multiplied|raised|to[ ]the|mod|modulo|choose|permute|remainder|[rR][ ]?\d+|"
    r"(?:below|above|under)(?=[ ](?:zero|par)\b|[ ]?(?:[.,;!)*\n]|$))|"
    r"north|south|east|west|out[ ]of|of[ ](?:the[ ])?\d+|"
    rf"and[ ](?:an?[ ]|one[ ])?(?:{_NUMBER_WORD}|quarter)|or[ ](?:so|above|below|{_MORE}|\d+)|"
    rf"{_MORE}[ ]than[ ](?:that|this|it|half|twice|\d+|{_NUMBER_WORD}))\b|[百千万亿億萬兆倍]",
    re.IGNORECASE,
)
# These change it where the phrase is all that is stated, but "she began 3 hours ago" may answer how many hours.
_CHANGE_AT_END = re.compile(r"(?:short|off|ago|lost|early|late)(?=[ ]?(?:[.,;!)*\n]|$))", re.IGNORECASE)
_STATED = re.compile(r"(?:\b(?:is|are)|[:=])[\s*\"(]*$")
_CLAUSE = re.compile(
    r"(?:for|from|in|on|at|by|to|with|after|before|of|or|the|an?|but|we|it|this|not|that|who|where|while|if|as)\b",
    re.IGNORECASE,
)
_STOP = re.compile(r"(?:equals?|makes?|gives?|is|are|was|were|because|since|so|which|when|and)\b", re.IGNORECASE)
_PHRASE_END = re.compile(r"[,;:()\[\]\n\"“”*`$|=]|[.!?](?:\s|$)")
_LONGEST_PHRASE = 80
# Words between a number and the one that changes its value: "5 degrees below zero".
_MOST_UNKNOWN = 2
_WORD = re.compile(rf"[ ]?(?:[^\W\d_]+|\d+)|[{CJK}]")
_BEFORE = re.compile(
    rf"\b(?:{_NUMBER_WORD}[ ](?:of|and)|half|twice|thrice|double|triple|(?:(?:square|cube)[ ])?root(?:[ ]of)?|between|"
    r"(?:square|cube|log(?:arithm)?|factorial)[ ]of|log|times|over|plus|minus|divided[ ]by|"
    rf"at[ ](?:least|most)|{_MORE}[ ]than|up[ ]to|above|below|under)[ ]$",
    re.IGNORECASE,
)
_LONGEST_BEFORE = 24


def words_before(text: str, start: int) -> str:
    """Return the words that change the value of the number that begins at `start`: "at least ", "half of "; or ""."""
    if not text[max(start - 2, 0) : start - 1].isalpha():
        return ""
    before = _BEFORE.search(text, max(start - _LONGEST_BEFORE, 0), start)
    return before[0] if before else ""


def words_after(text: str, start: int, end: int) -> str:
    """Return the words that change the value of the number in `text[start:end]`, such as " million"; or ""."""
    if not text[end : end + 2].lstrip(" ")[:1].isalpha():
        return ""
    stated = _STATED.search(text, max(start - 8, 0), start) is not None
    stop = _PHRASE_END.search(text, end, end + _LONGEST_PHRASE)
    limit = stop.start() if stop else min(end + _LONGEST_PHRASE, len(text))
    at, changed, unknown = end, 0, 0
    while unknown < _MOST_UNKNOWN and (word := _WORD.match(text, at, limit)):
        first = at + word[0].startswith(" ")
        change = _CHANGE.match(text, first, limit) or (stated and _CHANGE_AT_END.match(text, first))
        if change:
            changed = at = change.end()
        elif _STOP.match(text, first, limit) or (not changed and _CLAUSE.match(text, first, limit)):
            break
        else:
            at = word.end()
            changed = at if changed else 0
            unknown += not changed
    return text[end:changed]


def with_unit(value: str, text: str, end: int) -> tuple[str, int]:
    """Return `value`, which ends at `end` in `text`, with the unit that it has or that follows, and where that ends."""
    attached = _ATTACHED_UNIT.fullmatch(value)
    if attached and _is_unit(attached["unit"]) and (attached["unit"][1:] or attached["power"] or attached["space"]):
        return _measured(attached["number"], attached["unit"], attached["power"]), end
    units = _UNITS.match(text, end) if value[-1].isdigit() or value[-1] in "})" else None
    if units is None or not _is_unit(units["first"]):
        return value, end
    smaller = units.end()
    while (following := _SMALLER_UNIT.match(text, smaller)) and _is_unit(following["unit"]):
        smaller = following.end()
    if smaller > units.end():
        return value + text[end:smaller], smaller
    return _measured(value, units["unit"], units["power"]), units.end()


def _is_unit(word: str) -> bool:
    return word in UNIT_WORDS and word not in _RARELY_UNITS


def _measured(number: str, unit: str, power: str | None) -> str:
    return rf"{number} \text{{ {unit}}}{_POWERS.get(power or '', power or '')}"
