"""Reads the answer that prose states: by the words "answer" and "is", in several languages."""

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise, takewhile

from quartet_reward.math.expressions import Candidate, candidates
from quartet_reward.math.typed import FULL_WIDTH

# Characters at the end of a text in which an answer in prose is looked for.
LONGEST_PROSE = 20_000
_LONGEST_LIST = 2_000
_MOST_ANCHORS = 32
_LONGEST_BEFORE = 200

_WIDE = str.maketrans(
    FULL_WIDTH | {"。": ". ", "｡": ". ", "、": ", ", "；": "; ", "！": "! ", "？": "? ", **dict.fromkeys("「」“”", '"')}
)
_ALPHABETIC = ("answer", "antwort", "réponse", "respuesta", "resposta", "risposta", "ответ")
_WORDS_FOR_ANSWER = (*_ALPHABETIC, "答案", "答え", "正解", "정답", "选", "選")
ANSWER = re.compile(
    rf"(?<![^\W_])(?P<final>final\s+)?(?:{'|'.join(_ALPHABETIC)})s?(?![^\W_])"
    r"|答案|答え|正解|정답|[选選](?=[\s:是为]*\(?[A-Z])",
    re.IGNORECASE,
)
_COPULA = re.compile(r"\b(?:is|are|equals?|be|ist|est|es)\b|'s\b|[:=]|[是为為は]", re.IGNORECASE)
# What may stand before "answer" where a sentence states it, and between it and its value.
_BEGINS = re.compile(
    r"(?:[\W_]|(?:so|thus|therefore|hence|and|then|finally|now|in conclusion|the|our|my|correct|right)\b|因此|所以)*",
    re.IGNORECASE,
)
_STATES = re.compile(
    r"[\s*_)\"]*+(?:(?:to|of|for)\b[^.:=\n]{0,80}?)??[\s*_]*"
    r"(?:\b(?:is|are|equals|would be|will be|must be|should be|comes? to|ist|est|es)\b|[:=]|[是为為は]|(?<=\n))"
    r"(?:[\s*_:\"`(]|\b(?:is|thus|therefore|exactly|simply|just|equal to)\b)*"
    r"(?:[^.\d\n$\\]{0,60}(?:\$[^$\n\d]{1,20}\$)?[^.\d\n$\\]{0,20}\b(?:is|are|equals)\s+)?",
    re.IGNORECASE,
)
_UNSTATED = re.compile(
    r"\W{0,3}(?:must|should|has|have|needs?|can|could|was|will|may|might|makes?|seems|if|when|in|form|format)\b",
    re.IGNORECASE,
)
_ABOUT = re.compile(r"\b(?:in|of|about|for|with)\s+(?:(?:the|our|my|this|final)\s+)*$", re.IGNORECASE)
_IS_THE = re.compile(r"(?:\b(?:is|are)|=)\s+(?:(?:the|our|my|a|correct|right|required|final)\s+)*$", re.IGNORECASE)
_NOT = re.compile(r"(?:\bnot|n't|不是)\s*[$(*]*$")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|\n\s*\n")
_DISPLAY = re.compile(r"\$\$|\\\[|\\begin")
_BETWEEN = re.compile(
    r"[\s\"*]*(?:,|;|[,(]?\s*\b(?:and|or)\b|\\quad|\\text\{\s*(?:and|or)\s*\}|[和或])[\s\"*]*", re.IGNORECASE
)
# "11 hens and 4 goats"
_COUNTED = re.compile(r"(?:[ ](?!and\b|or\b|is\b|are\b)[^\W\d_]+){1,2}(?:,|,?[ ](?:and|or))[ ]", re.IGNORECASE)
_NOUN = re.compile(r"(?:[ ](?!and\b|or\b|is\b|are\b|in\b|for\b|because\b)[^\W\d_]+){0,2}", re.IGNORECASE)
_WORDS = re.compile(
    r"[*_)\s]*(?:[:\n]|(?:is|are)\b|[是为為は])[\s:]*(?:(?:is|are)\b[\s:]*)?[*_\"`(]*"
    r"(?P<words>[^\W\d_]+(?:(?:, |[ '’-])[^\W\d_]+){0,4}?)(?:です)?[*_\"`)]*[.。]?\s*"
)
_YES_OR_NO = re.compile(r"(?:[Yy]es|YES|[Nn]o|NO)(?=[,.;!*]|\s+(?:because|since)\b)")
_SHORT = re.compile(r"\W*(?P<words>[^\W\d_]+(?:[ -][^\W\d_]+)?)\W*")


def half_width(text: str) -> str:
    """Return `text` with ASCII digits, letters and punctuation for full-width ones."""
    return text if text.isascii() else text.translate(_WIDE)


def answer_in_prose(text: str, outside_formulas: bool = True) -> str | None:
    """Return the answer that `text` states, as LaTeX, or None if it states none.

    Args:
        text: the completion after its thought.
        outside_formulas: read expressions outside formulas too, and plain words ("The answer is east.").
    """
    text = half_width(text[-LONGEST_PROSE:])
    anchors = _anchors(text)
    anchors = [one for one in anchors if one["final"]] or anchors
    for anchor in reversed(anchors):
        if outside_formulas and (stated := _value_of(text, anchor)):
            return stated
    if anchors and not _UNSTATED.match(text, anchors[-1].end()):
        # Searched from here: a lone dollar sign before must not pair with one of the answer.
        statement = text[anchors[-1].end() :]
        if after := list(candidates(statement, outside_formulas)):
            return _stated(statement, after)
        end = _SENTENCE_END.search(statement)
        if outside_formulas and (words := _WORDS.fullmatch(statement[: end.end()] if end else statement)):
            return words["words"]
    # The last line first, or the last paragraph: no formula goes beyond one.
    end_of_line = "\n\n" if _DISPLAY.search(text) else "\n"
    for last in (text[text.rstrip().rfind(end_of_line) + 1 :], text):
        if found := _outside_parentheses(last, list(candidates(last, outside_formulas))):
            text = last
            break
    else:
        words = _SHORT.fullmatch(text[:100]) or re.match(rf"\s*(?P<words>{_YES_OR_NO.pattern})", text)
        return words["words"] if outside_formulas and words else None
    first = len(found) - 1
    while first > 0 and _joins(text, found[first - 1], found[first]):
        first -= 1
    return joined([one.text for one in found[first:]])


def final_statement(text: str) -> str | None:
    """Return the value of the last "final answer: …" or "the final answer is …" in `text`, or None if there is none."""
    text = half_width(text[-LONGEST_PROSE:])
    for anchor in reversed(_anchors(text)):
        line = max(text.rfind("\n", 0, anchor.start()) + 1, anchor.start() - _LONGEST_BEFORE, 0)
        begin = max((end.end() for end in _SENTENCE_END.finditer(text, line, anchor.start())), default=line)
        if (
            anchor["final"]
            and _BEGINS.fullmatch(text, begin, anchor.start())
            and (stated := _stated_after(text, anchor.end()))
        ):
            return stated
    return None


def joined(elements: Sequence[str]) -> str:
    """Return several answers as one list, without repetitions."""
    return ", ".join(dict.fromkeys(elements))


def as_one_list(text: str) -> str | None:
    """Return `$1$ and $2$` as a list; None if there is anything beside formulas and the words that join them."""
    if len(text) > _LONGEST_LIST:
        return None
    formulas = list(candidates(text))
    if (
        not formulas
        or any(one.computed for one in formulas)
        or text[: formulas[0].start].strip()
        or text[formulas[-1].end :].strip(" \t\n.")
    ):
        return None
    gaps = [text[one.end : two.start] for one, two in pairwise(formulas)]
    return joined([one.text for one in formulas]) if all(_BETWEEN.fullmatch(gap) for gap in gaps) else None


def _anchors(text: str) -> list[re.Match[str]]:
    lowered = text.lower()
    if not any(word in lowered for word in _WORDS_FOR_ANSWER):
        return []
    return list(deque(ANSWER.finditer(text), maxlen=_MOST_ANCHORS))


def _value_of(text: str, anchor: re.Match[str]) -> str | None:
    """Return the value that the sentence of an "answer" states: "the answer is 5", "5 is the answer"."""
    before = max(anchor.start() - _LONGEST_BEFORE, 0)
    if is_the := _IS_THE.search(text, before, anchor.start()):
        sentence = _SENTENCE_END.split(text[before : is_the.start()])[-1]
        found = _outside_parentheses(sentence, list(candidates(sentence)))
        return found[-1].text if found else None
    return None if _ABOUT.search(text, before, anchor.start()) else _stated_after(text, anchor.end())


def _stated_after(text: str, at: int) -> str | None:
    """Return the value that follows "answer", if it follows at once: "is 5", ": 5", but not "was checked in 5 ways"."""
    states = _STATES.match(text, at)
    if states is None:
        return None
    statement = text[at : states.end() + _LONGEST_LIST]
    found = list(candidates(statement))
    first = next((one for one in found if one.end > states.end() - at), None)
    if yes_or_no := _YES_OR_NO.match(text, states.end()):
        return yes_or_no[0]
    if first is None or first.start > states.end() - at:
        return None
    return _stated(statement, found)


def _stated(text: str, found: list[Candidate]) -> str:
    starts = [one.start for one in found]

    def outside(position: int) -> bool:
        """Return whether a position is in no candidate: periods and equals signs in formulas are not the sentence's."""
        before = bisect_right(starts, position) - 1
        return before < 0 or position >= found[before].end

    ends = (match.start() for match in _SENTENCE_END.finditer(text, found[0].end - 1))
    end = next((position for position in ends if position >= found[0].end and outside(position)), len(text))
    sentence = _outside_parentheses(text, found[: bisect_left(starts, end)])
    stated = [one for one in sentence if not _NOT.search(text, max(one.start - 12, 0), one.start)]
    if not stated:
        return f"not {sentence[0].text}"
    sentence = stated
    values = [one for one in sentence if not one.name] or sentence
    # The first value after the last "is" that has one.
    copulas = [match.end() for match in _COPULA.finditer(text, 0, end) if outside(match.start())]
    before_last_value = bisect_right(copulas, values[-1].start)
    first = values[0]
    if before_last_value:
        copula = copulas[before_last_value - 1]
        first = values[bisect_left([one.start for one in values], copula)]
    rest = sentence[sentence.index(first) :]
    if len(rest) > 1 and _COUNTED.fullmatch(text, first.end, rest[1].start):
        last = list(takewhile(lambda pair: _COUNTED.fullmatch(text, pair[0].end, pair[1].start), pairwise(rest)))[-1][1]
        noun = _NOUN.match(text, last.end)
        return text[first.start : noun.end() if noun else last.end]
    followers = takewhile(lambda pair: _joins(text, *pair), pairwise(rest))
    return joined([first.text, *(follower.text for _, follower in followers)])


def _outside_parentheses(text: str, found: list[Candidate]) -> list[Candidate]:
    """Return the candidates without those in a parenthesis that follows another one: "3 (of 12 options)"."""
    kept: list[Candidate] = []
    for one in found:
        begin = max(kept[-1].end, one.start - _LONGEST_BEFORE) if kept else one.start
        opened = text.rfind("(", begin, one.start)
        if opened <= text.rfind(")", begin, one.start) or text.startswith("or ", opened + 1):
            kept.append(one)
    return kept


def _joins(text: str, one: Candidate, other: Candidate) -> bool:
    """Return whether only "and", a comma or the like separates two candidates, so that they form one list."""
    return not other.computed and _BETWEEN.fullmatch(text, one.end, other.start) is not None
