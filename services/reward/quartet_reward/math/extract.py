"""The answer that a completion gives, and that a reference gives, by policy: in tags, in boxes, in prose."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quartet_reward.answer_extraction import LONGEST_READ, joined_boxes, last_box, last_boxed, last_tagged_answer
from quartet_reward.math.notation import undelimited
from quartet_reward.math.prose import answer_in_prose, as_one_list, final_statement, joined

# Beyond this, a reference is a worked solution rather than an answer.
_LONGEST_PLAIN_REFERENCE = 200

# Backslashes doubled on the way through JSON, before a command that never follows a line break.
_DOUBLED_BOX = re.compile(r"\\\\(?=(?:boxed|fbox)\s*\{)")
_DOUBLED = re.compile(r"\\\\(?=(?:d?frac|left|right|sqrt|text|le|ge|leq|geq|pi|cdot|times|cup|infty|quad)(?![a-zA-Z]))")
_OPEN_BOX = re.compile(r"\\boxed\s*\{(?P<rest>[^$]*)$", re.DOTALL)
# An equation and nothing else.
_EQUATION = re.compile(r"[^\s$]{1,200}=[^\s$]{1,200}")
_DELIMITED = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)")


@dataclass(frozen=True, slots=True)
class ReadingPolicy:
    """Which of a completion's statements is its answer."""

    answer_in: Literal["anywhere", "answer_tags", "box", "prose"] = "anywhere"
    boxes: Literal["joined", "last"] = "joined"
    prose: Literal["numbers", "formulas"] = "numbers"
    choices: tuple[str, ...] = ()

    def described(self) -> str:
        """Return where the answer is looked for, in words."""
        places = {"anywhere": "<answer> tags, boxes, prose", "answer_tags": "<answer> tags", "box": "boxes"}
        return places.get(self.answer_in, "prose") + (f"; one of {', '.join(self.choices)}" if self.choices else "")


def final_answer(text: str, policy: ReadingPolicy) -> str | None:
    """Return the answer that the end of `text`, what follows the thought, gives, or None if it gives none."""
    text = undoubled(text[-LONGEST_READ:])
    tagged = last_tagged_answer(text) if policy.answer_in in ("anywhere", "answer_tags") else None
    if policy.answer_in == "answer_tags" and tagged is None:
        return None
    if tagged is not None:
        return _boxed(tagged, policy) or _choice(tagged, policy) or _short_form(tagged, policy)
    if policy.answer_in == "anywhere":
        box = last_box(text)
        # "Final answer: 8" after a box takes the box back.
        if box and not policy.choices and (stated := final_statement(text[box.end :])):
            return stated
    boxed = _boxed(text, policy) if policy.answer_in in ("anywhere", "box") else None
    if boxed or policy.answer_in == "box":
        return boxed
    if _EQUATION.fullmatch(text.strip()):
        return text.strip()
    return _choice(text, policy) if policy.choices else answer_in_prose(text, policy.prose == "numbers")


def reference_answer(reference: str, policy: ReadingPolicy) -> str:
    """Return the answer of a reference, which may be a worked solution with its answer in a box or in prose."""
    reference = undoubled(reference.strip())
    if policy.choices:
        return _choice(reference, policy) or reference
    if boxed := _boxed(reference, policy):
        return boxed
    if "\\boxed" in reference and (unclosed := _OPEN_BOX.search(reference)):
        return unclosed["rest"].strip()
    if (formula := undelimited(reference)) != reference:
        return formula
    # A matrix or an aligned equation is long, and is no prose.
    if not _DELIMITED.search(reference) and (len(reference) <= _LONGEST_PLAIN_REFERENCE or not _is_prose(reference)):
        return reference
    return as_one_list(reference) or answer_in_prose(reference) or reference


def undoubled(text: str) -> str:
    """Return `text` with single backslashes where a way through JSON doubled them (`\\\\\\\\frac` is no LaTeX)."""
    if "\\\\" not in text:
        return text
    text = _DOUBLED_BOX.sub(lambda _: "\\", text)
    return text if "\\begin" in text else _DOUBLED.sub(lambda _: "\\", text)


def _boxed(text: str, policy: ReadingPolicy) -> str | None:
    contents = joined_boxes(text) if policy.boxes == "joined" else [last_boxed(text) or ""]
    answer = joined([content for content in contents if content])
    return (_choice(answer, policy) if policy.choices else answer) or None


def _choice(text: str, policy: ReadingPolicy) -> str | None:
    return chosen(text, policy.choices) if policy.choices else None


def _short_form(text: str, policy: ReadingPolicy) -> str | None:
    """An answer in tags is an answer as it stands, unless it is prose around one."""
    if policy.choices:
        return None
    return as_one_list(text) or (answer_in_prose(text) if _is_prose(text) else None) or text.strip() or None


def _is_prose(text: str) -> bool:
    return bool(re.search(r"\banswer\b|[^\W\d_]{2,}\s+(?:is|are|equals)\s", text, re.IGNORECASE))


# A choice stands at the end of a completion; what is farther away is working.
_LONGEST_READ = 20_000
_ANSWER = re.compile(r"\banswer\b", re.IGNORECASE)


def chosen(text: str, choices: Sequence[str]) -> str | None:
    """Return which of `choices` the text chooses, or None if it names none.

    The first that follows the last "answer"; else one at the start of a line ("B. Because …"); else the last one.
    A choice stands by itself: "A" is not chosen by "All".
    """
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
