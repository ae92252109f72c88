"""Reads the answer of a completion or a reference: in tags, in boxes or in prose, by policy."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from quartet_reward.answer_extraction import LONGEST_READ, last_box, last_boxed, last_tagged_answer
from quartet_reward.math.boxes import joined_boxes
from quartet_reward.math.choices import chosen
from quartet_reward.math.expressions import candidates
from quartet_reward.math.prose import ANSWER, answer_in_prose, as_one_list, final_statement
from quartet_reward.math.spelling import undelimited

_LONGEST_CACHED = 4_000
# Longer references may be worked solutions.
_LONGEST_PLAIN_REFERENCE = 200
# The last line of a worked solution of GSM8K.
_MARKED = re.compile(r"####(?P<answer>[^\n#]*\S[^\n#]*)\Z")
_EMPHASIZED = re.compile(r"\A(?P<mark>\*{1,3}|`)(?P<inside>[^*`]+)(?P=mark)\Z")

# Backslashes doubled by JSON escaping, before commands that never follow a line break.
_DOUBLED_BOX = re.compile(r"\\\\(?=(?:boxed|fbox)\s*\{)")
_DOUBLED = re.compile(r"\\\\(?=(?:d?frac|left|right|sqrt|text|le|ge|leq|geq|pi|cdot|times|cup|infty|quad)(?![a-zA-Z]))")
_OPEN_BOX = re.compile(r"\\boxed\s*\{(?P<rest>[^$]*)$", re.DOTALL)
# Words before the value at the end of a sentence.
_LEADS = re.compile(
    r"[\w\s,.:;'’*-]*?(?:\b(?:is|are|equals?|get|have|obtain|therefore|thus|so|hence|result|total)\b|[:=是为為])[\s,:*]*",
    re.IGNORECASE,
)
_NOUN = re.compile(r"(?:[ ](?!(?:is|are|and|or|if|when|for|because|since)\b)[^\W\d_]+){0,3}")
_PROSE = re.compile(r"\banswer\b|(?<![^\W\d_])[^\W\d_]{2,}+\s++(?:is|are|equals)\s", re.IGNORECASE)
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


def final_answer(text: str, policy: ReadingPolicy, letters: Sequence[str] = "") -> str | None:
    """Return the answer of `text`, or None if it has none.

    Args:
        text: the completion after its thought.
        policy: where it is read.
        letters: what prose chooses from if the policy names no choices, but the reference is a choice.
    """
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
    if choices := policy.choices or letters:
        return chosen(text, choices)
    return answer_in_prose(text, policy.prose == "numbers")


ANYWHERE = ReadingPolicy()


def reference_answer(reference: str, policy: ReadingPolicy = ANYWHERE) -> str:
    """Return the answer of a reference, by the first rule that finds one; else the reference is its own answer.

    After the last `####`; in a box; in one formula; in prose that states it ("The area is 72.", "Answer: 72").
    """
    if reference.isalnum() and not policy.choices:
        return reference
    read = _read_once if len(reference) <= _LONGEST_CACHED else _answer_of_reference
    return read(reference, policy)


def _answer_of_reference(reference: str, policy: ReadingPolicy) -> str:
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
    if _DELIMITED.search(reference) or ANSWER.search(reference):
        return as_one_list(reference) or answer_in_prose(reference) or reference
    if len(reference) > _LONGEST_PLAIN_REFERENCE and _is_prose(reference):
        return answer_in_prose(reference) or reference
    return _stated_last(reference) or reference


# It is read for each completion of its prompt.
_read_once = lru_cache(maxsize=1024)(_answer_of_reference)


def _stated_last(text: str) -> str | None:
    """Return `72` of "The area is 72." and `x = 72` of "Therefore, x = 72."; None if no value ends the text so."""
    if text.isascii() and not re.search(r"[\s:]", text):
        return None
    line = text[-_LONGEST_PLAIN_REFERENCE:].rpartition("\n")[2].strip().rstrip(".")
    found = list(candidates(line))
    if not found or not _NOUN.fullmatch(line, found[-1].end):
        return None
    return found[-1].text if _LEADS.fullmatch(line, 0, found[-1].start) else None


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
    return _PROSE.search(text) is not None
