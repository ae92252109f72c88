"""Reads the answer of a completion or a reference: in tags, in boxes or in prose, by policy."""

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from quartet_reward.answer_extraction import LONGEST_READ, last_box, last_boxed, last_tagged_answer
from quartet_reward.math.boxes import joined_boxes
from quartet_reward.math.notation import is_name
from quartet_reward.math.quantities import UNIT_WORDS
from quartet_reward.math.spelling import undelimited

# Characters at the end of a text in which an answer in prose is looked for.
_LONGEST_READ = 20_000
_LONGEST_LIST = 2_000

_FORMULA = (
    r"(?<!\\)\$\$(?P<display>(?:[^$\\]|\\.)+?)\$\$"
    # None may contain its own opening: thousands of unclosed openings would each be matched to the end of the text.
    r"|(?<!\\)\\\[(?P<bracket>(?:[^\\]|\\(?![\[\]]).)+?)\\\]"
    # On one line only: a lone dollar sign is money and must not match one far away.
    r"|(?<![\\\d$])\$(?P<inline>(?:[^$\\\n]|\\.)+?)\$"
    r"|(?<!\\)\\\((?P<parenthesis>(?:[^\\\n]|\\(?![()])[^\n])+?)\\\)"
)
_DIGITS = r"(?:[1-9]\d{0,2}(?:[, ]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\w))?"
_RATIO_OR_TIME = r"\d{1,9}:\d{1,9}(?![\d:])"
_TERM = rf"\\frac\{{\d+\}}\{{\d+\}}|{_DIGITS}"
_NUMBER = (
    r"(?:(?<=[\s=:(*\"'“≈])|^)[$€£¥₹₽₩₿]?"
    rf"(?P<number>{_RATIO_OR_TIME}|[-−–+]?(?:{_TERM})(?:\s?[-−+*/^×·]\s?(?:{_TERM}))*)"
    # Not part of a longer expression, such as the 8 of 8*(3+x).
    r"(?!\d|[.,]\d|\s?[*/^×·]\s?[\w(\\]|\()"
)
_PERCENT = r"(?P<percent>\s*(?:\\?%|percent(?:age)?\b|pct\b))?"
_CANDIDATE = re.compile(rf"(?:{_FORMULA}|{_NUMBER}){_PERCENT}", re.DOTALL | re.MULTILINE)
_UNIT = re.compile(r"\s?(?P<unit>[ap]\.m\.|[A-Za-zµ]+(?:/[hs])?)(?P<power>[²³]|\^[23])?(?![\w-])")

_ANSWER = re.compile(r"\banswer\b", re.IGNORECASE)
_FINAL_ANSWER = re.compile(r"\bfinal\s+answer\b", re.IGNORECASE)
_COPULA = re.compile(r"\b(?:is|are|equals?|be)\b|'s\b|[:=]", re.IGNORECASE)
_NOT = re.compile(r"(?:\bnot|n't)\s+$")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|\n\s*\n")
_BETWEEN = re.compile(
    r"[\s\"“”*]*(?:,|;|,?\s*\b(?:and|or)\b|\\quad|\\text\{\s*(?:and|or)\s*\})[\s\"“”*]*", re.IGNORECASE
)
_WORDS = re.compile(
    r"[\s:]*(?:(?:is|are)\b[\s:]*)?[*_\"“(]*(?P<words>[^\W\d_]+(?:[ '’-][^\W\d_]+){0,4})[*_\"”)]*\.?\s*"
)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A formula or number that may be the answer, and its position."""

    start: int
    end: int
    text: str
    name: bool


def answer_in_prose(text: str, numbers: bool = True) -> str | None:
    """Return the answer that `text` states, as LaTeX, or None if it states none.

    Args:
        text: the completion after its thought.
        numbers: read numbers outside formulas too, and plain words ("The answer is east.").
    """
    text = text[-_LONGEST_READ:]
    for anchor in (_last(_FINAL_ANSWER, text), _last(_ANSWER, text)):
        if anchor is None:
            continue
        # Searched from here: a lone dollar sign before must not pair with one of the answer.
        statement = text[anchor.end() :]
        if after := _candidates(statement, numbers):
            return _stated(statement, after)
        end = _SENTENCE_END.search(statement)
        if numbers and (words := _WORDS.fullmatch(statement[: end.end()] if end else statement)):
            return words["words"]
    found = _candidates(text, numbers)
    if not found:
        return None
    first = len(found) - 1
    while first > 0 and _joins(text, found[first - 1], found[first]):
        first -= 1
    return joined([one.text for one in found[first:]])


def final_statement(text: str) -> str | None:
    """Return the formula or number that follows the last "final answer" of `text`, or None if there is none."""
    text = text[-_LONGEST_READ:]
    anchor = _last(_FINAL_ANSWER, text)
    after = [] if anchor is None else _candidates(text[anchor.end() :], numbers=True)
    return _stated(text[anchor.end() :], after) if anchor and after else None


def joined(elements: Sequence[str]) -> str:
    """Return several answers as one list, without repetitions."""
    return ", ".join(dict.fromkeys(elements))


def as_one_list(text: str) -> str | None:
    """Return `$1$ and $2$` as a list; None if there is anything beside formulas and the words that join them."""
    if len(text) > _LONGEST_LIST:
        return None
    formulas = _candidates(text, numbers=True)
    if not formulas or text[: formulas[0].start].strip() or text[formulas[-1].end :].strip(" \t\n."):
        return None
    gaps = [text[one.end : two.start] for one, two in pairwise(formulas)]
    return joined([one.text for one in formulas]) if all(_BETWEEN.fullmatch(gap) for gap in gaps) else None


def _candidates(text: str, numbers: bool) -> list[_Candidate]:
    found = []
    for match in _CANDIDATE.finditer(text):
        number = match["number"]
        if number is not None and not numbers:
            continue
        groups = (number, *match.group("display", "bracket", "inline", "parenthesis"))
        inner, end = next(filter(None, groups)).strip(), match.end()
        if not inner:
            continue
        if match["percent"]:
            inner += r"\%"
        elif number is not None and (unit := _UNIT.match(text, end)) and unit["unit"] in UNIT_WORDS:
            power = {"²": "^2", "³": "^3"}.get(unit["power"] or "", unit["power"] or "")
            inner, end = rf"{inner} \text{{ {unit['unit']}}}{power}", unit.end()
        found.append(_Candidate(match.start(), end, inner, number is None and is_name(inner)))
    return found


def _stated(text: str, candidates: list[_Candidate]) -> str:
    starts = [one.start for one in candidates]

    def outside(position: int) -> bool:
        """Return whether a position is in no candidate: periods and equals signs in formulas are not the sentence's."""
        before = bisect_right(starts, position) - 1
        return before < 0 or position >= candidates[before].end

    ends = (match.start() for match in _SENTENCE_END.finditer(text, candidates[0].end - 1))
    end = next((position for position in ends if position >= candidates[0].end and outside(position)), len(text))
    sentence = candidates[: bisect_left(starts, end)]
    sentence = [one for one in sentence if not _NOT.search(text, max(one.start - 12, 0), one.start)] or sentence
    values = [one for one in sentence if not one.name] or sentence
    # The first value after the last "is" that has one.
    copulas = [match.end() for match in _COPULA.finditer(text, 0, end) if outside(match.start())]
    before_last_value = bisect_right(copulas, values[-1].start)
    first = values[0]
    if before_last_value:
        copula = copulas[before_last_value - 1]
        first = values[bisect_left([one.start for one in values], copula)]
    rest = sentence[sentence.index(first) :]
    followers = takewhile(lambda pair: _joins(text, *pair), pairwise(rest))
    return joined([first.text, *(follower.text for _, follower in followers)])


def _joins(text: str, one: _Candidate, other: _Candidate) -> bool:
    """Return whether only "and", a comma or the like separates two candidates, so that they form one list."""
    return _BETWEEN.fullmatch(text, one.end, other.start) is not None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


# The last line of a worked solution of GSM8K.
_MARKED = re.compile(r"####(?P<answer>[^\n#]*\S[^\n#]*)\Z")
_EMPHASIZED = re.compile(r"\A(?P<mark>\*{1,3}|`)(?P<inside>[^*`]+)(?P=mark)\Z")

# Backslashes doubled by JSON escaping, before commands that never follow a line break.
_DOUBLED_BOX = re.compile(r"\\\\(?=(?:boxed|fbox)\s*\{)")
_DOUBLED = re.compile(r"\\\\(?=(?:d?frac|left|right|sqrt|text|le|ge|leq|geq|pi|cdot|times|cup|infty|quad)(?![a-zA-Z]))")
_OPEN_BOX = re.compile(r"\\boxed\s*\{(?P<rest>[^$]*)$", re.DOTALL)
# An equation and nothing else.
_EQUATION = re.compile(r"[^\s$]{1,200}=[^\s$]{1,200}")
_DELIMITED = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)")


class ReadingPolicy(BaseModel):
    """Parameters of `math`: where the answer is read."""

    model_config = ConfigDict(frozen=True)

    answer_in: Literal["anywhere", "answer_tags", "box", "prose"] = Field(
        "anywhere", description="Where the answer is read; anywhere: the last <answer> tags, else boxes, else prose."
    )
    boxes: Literal["joined", "last"] = Field(
        "joined", description="Adjacent boxes (\\boxed{1} and \\boxed{2}) are one list, or only the last box counts."
    )
    prose: Literal["numbers", "formulas"] = Field(
        "numbers", description="What is read in prose: formulas, numbers and words, or formulas ($...$) only."
    )
    choices: tuple[str, ...] = Field(
        (), max_length=64, description="The letters of a multiple-choice question; the answer is then one of them."
    )

    def described(self) -> str:
        """Describe where the answer is looked for."""
        places = {"anywhere": "<answer> tags, boxes, prose", "answer_tags": "<answer> tags", "box": "boxes"}
        return places.get(self.answer_in, "prose") + (f"; one of {', '.join(self.choices)}" if self.choices else "")


def final_answer(text: str, policy: ReadingPolicy) -> str | None:
    """Return the answer of `text`, the completion after its thought, or None if it has none."""
    text = undoubled(text[-LONGEST_READ:])
    tagged = last_tagged_answer(text) if policy.answer_in in ("anywhere", "answer_tags") else None
    if policy.answer_in == "answer_tags" and tagged is None:
        return None
    if tagged is not None:
        return _boxed(tagged, policy) or chosen(tagged, policy.choices) or _short_form(tagged, policy)
    if policy.answer_in == "anywhere":
        box = last_box(text)
        # "Final answer: 8" after a box overrides the box.
        if box and not policy.choices and (stated := final_statement(text[box.end :])):
            return stated
    boxed = _boxed(text, policy) if policy.answer_in in ("anywhere", "box") else None
    if boxed or policy.answer_in == "box":
        return boxed
    if _EQUATION.fullmatch(text.strip()):
        return text.strip()
    return chosen(text, policy.choices) if policy.choices else answer_in_prose(text, policy.prose == "numbers")


ANYWHERE = ReadingPolicy()


def reference_answer(reference: str, policy: ReadingPolicy = ANYWHERE) -> str:
    """Return the answer of a reference, by the first rule that finds one; else the reference is its own answer.

    After the last `####`; in a box; in one formula; in prose that states it ("The area is 72.", "Answer: 72").
    """
    reference = undoubled(reference.strip())
    if marked := _MARKED.search(reference):
        reference = marked["answer"].strip()
    reference = _EMPHASIZED.sub(r"\g<inside>", reference)
    if policy.choices:
        return chosen(reference, policy.choices) or reference
    if boxed := _boxed(reference, policy):
        return boxed
    if "\\boxed" in reference and (unclosed := _OPEN_BOX.search(reference)):
        return unclosed["rest"].strip()
    if (formula := undelimited(reference)) != reference:
        return formula
    reference = reference.removeprefix("=").lstrip()
    # A matrix or an aligned equation may be long, but is not prose.
    if not _DELIMITED.search(reference) and not _is_prose(reference):
        return reference
    return as_one_list(reference) or answer_in_prose(reference) or reference


def undoubled(text: str) -> str:
    """Return `text` with single backslashes where JSON escaping has doubled them (`\\\\\\\\frac`)."""
    if "\\\\" not in text:
        return text
    text = _DOUBLED_BOX.sub(lambda _: "\\", text)
    return text if "\\begin" in text else _DOUBLED.sub(lambda _: "\\", text)


def _boxed(text: str, policy: ReadingPolicy) -> str | None:
    answer = joined_boxes(text) if policy.boxes == "joined" else last_boxed(text)
    return chosen(answer, policy.choices) if answer and policy.choices else answer or None


def _short_form(text: str, policy: ReadingPolicy) -> str | None:
    """Return the answer in a tag's content: all of it, unless that is prose around an answer."""
    if policy.choices:
        return None
    return as_one_list(text) or (answer_in_prose(text) if _is_prose(text) else None) or text.strip() or None


def _is_prose(text: str) -> bool:
    return bool(re.search(r"\banswer\b|[^\W\d_]{2,}\s+(?:is|are|equals)\s", text, re.IGNORECASE))


def chosen(text: str, choices: Sequence[str]) -> str | None:
    """Return which of `choices` the text chooses, or None.

    That is the first after the last "answer", else one at the start of a line ("B. Because …"), else the last. Only
    whole words count: "All" does not choose "A".
    """
    if not choices:
        return None
    text = text[-_LONGEST_READ:]
    named = "|".join(re.escape(choice) for choice in sorted(choices, key=len, reverse=True))
    matches = list(re.finditer(rf"(?<![\w\\])(?P<choice>{named})(?![\w'’])", text))
    if not matches:
        return None
    anchors = [anchor.end() for anchor in _ANSWER.finditer(text) if anchor.end() <= matches[-1].start()]
    if anchors:
        return next(match["choice"] for match in matches if match.start() >= anchors[-1])
    if match := re.search(rf"^[\s*]*\(?(?P<choice>{named})(?:\)|\*\*)?[.):,]", text, re.MULTILINE):
        return match["choice"]
    return matches[-1]["choice"]
