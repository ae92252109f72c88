"""Reads multiple-choice answers: which letters a text chooses, and options with their text."""

import re
from bisect import bisect_right
from collections.abc import Sequence

from quartet_reward.math.prose import ANSWER, LONGEST_PROSE, half_width
from quartet_reward.math.words import CJK

_LETTERS = "ABCDEFGHIJ"
_LONGEST_LIST = 200
_SIGN = r"(?:[,;/&和或与]|\band\b|\bor\b|\\text\s*+\{\s*+(?:and|or)\s*+\})"
_SEPARATOR = rf"\s*+{_SIGN}(?:\s|{_SIGN})*+"
_DENIED = re.compile(r"(?:\bnot|n't|\bnever|\bthan|不是|不选)\s+(?:[Oo]ption\s+)?[(*]*$")
_CORRECT = r"[)*]*\s+(?:is|are)\s+(?:the\s+)?(?:correct|right|best|answer)\b"
_REASON = re.compile(r"\b(?:because|since)\b[^.!?\n]*", re.IGNORECASE)
_ARTICLE = re.compile(r"A\s+[a-z]")
_CLAUSE = re.compile(r"A\s+(?:is|because|since|as|and|or)\b")
# A letter as a label: (B), B), B., \textbf{(B)}, Option B; then the text of the option, which is no formula with B.
_WRAPPED = (
    r"\\(?:text\w{0,2}|math(?:rm|bf)|mbox)\s*\{\s*(?:[Oo]ption\s+)?\(?(?P<wrapped>[A-J])\s*(?:[.:)]\s*)?\}\)?[.:]?"
)
_LABEL = re.compile(
    rf"(?:{_WRAPPED}|\((?P<enclosed>[A-J])\)|(?:[Oo]ption\s+\(?)(?P<named>[A-J])\)?[.:]?|(?P<marked>[A-J])(?:\)|[.:](?=\s|\\|$)))"
    r"(?:\s|~|\\(?:[ ,;:!]|q?quad(?![a-zA-Z])))*(?P<content>.*)",
    re.DOTALL,
)
_CONTINUED = re.compile(
    r"[=+*/^_<>'&|-]|\\(?:cup|cap|times|cdot|in|to|le|ge|ne|leq|geq|neq|setminus|subset)(?![a-zA-Z])"
)
_LETTER_LIST = re.compile(r"[A-J](?:\s*+(?:[,;、]\s*+)?(?:and\s++)?[A-J])*+")


def chosen(text: str, choices: Sequence[str]) -> str | None:
    """Return which of `choices` the text chooses, several as `A, C`; None if it chooses none.

    That is what follows the last "answer", else one at the start of a line ("B. Because …"), else the last. Only
    whole words count: "All" does not choose "A", nor does the article of "A good choice".
    """
    if not choices:
        return None
    text = half_width(text[-LONGEST_PROSE:])
    named = "|".join(re.escape(choice) for choice in sorted(choices, key=len, reverse=True))
    one = rf"[(*]*+(?:{named})[)*]*+"
    if len(text) <= _LONGEST_LIST and re.fullmatch(rf"\s*+{one}(?:{_SEPARATOR}{one}|\s*+{one})*+\s*+", text):
        return _listed(text, named)
    # A letter of Chinese or Japanese may stand at either side.
    letter = rf"(?<![^\W{CJK}])(?<!\\)(?:{named})(?![^\W{CJK}]|['’])"
    found = [
        one for one in re.finditer(letter, text) if not _DENIED.search(text, max(one.start() - 16, 0), one.start())
    ]
    if not found:
        return None
    several = re.compile(rf"{letter}(?:[)*]*{_SEPARATOR}[(*]*{letter}(?!\s+(?:is|are|was)\b))*")
    anchors = [anchor.end() for anchor in ANSWER.finditer(text) if anchor.end() <= found[-1].start()]
    if anchors:
        first = next(one for one in found if one.start() >= anchors[-1])
    elif correct := list(re.finditer(rf"{letter}(?={_CORRECT})", text)):
        first = correct[-1]
    elif labels := re.search(rf"^[ \t*]*\(?(?P<choice>{named})(?:\)|\*\*)?[.):,]", text, re.MULTILINE):
        return labels["choice"]
    else:
        reasons = [reason.span() for reason in _REASON.finditer(text) if reason.start() > found[0].start()]
        found = [one for one in found if not _is_article(text, one) and not _within(one.start(), reasons)]
        if not found:
            return None
        first = next(one for one in several.finditer(text, found[0].start()) if one.end() >= found[-1].end())
    listed = several.match(text, first.start())
    return _listed(listed[0], named) if listed else first[0]


def _within(position: int, spans: Sequence[tuple[int, int]]) -> bool:
    at = bisect_right(spans, (position, position))
    return at > 0 and position < spans[at - 1][1]


def _listed(text: str, named: str) -> str:
    return ", ".join(dict.fromkeys(re.findall(rf"{named}", text)))


def _is_article(text: str, match: re.Match[str]) -> bool:
    return _ARTICLE.match(text, match.start()) is not None and not _CLAUSE.match(text, match.start())


def letters_of(reference: str) -> Sequence[str]:
    """Return the letters among which a reference that is one option, or several ("AC"), chooses; none if it is not."""
    label, _ = option(reference)
    if label:
        return _LETTERS[: max(_LETTERS.index(label) + 1, 5)]
    return ""


def option(text: str) -> tuple[str, str]:
    """Return the letter and the text of an option such as `\\textbf{(B)}\\ 12`, empty if it has none."""
    text = text.strip().strip("$*` ").rstrip(".")
    if len(text) == 1 and text in _LETTERS:
        return text, ""
    found = _LABEL.fullmatch(text)
    if found is None or _CONTINUED.match(found["content"]):
        return "", ""
    letter = found["wrapped"] or found["enclosed"] or found["named"] or found["marked"]
    return letter, found["content"].strip()


def paired(answer: str, reference: str) -> tuple[str, str]:
    """Return what to compare where one side names an option by its letter and the other one by its text, or by both."""
    (letter, content), (expected, expected_content) = option(answer), option(reference)
    if letter and expected:
        return (
            (content, expected_content) if letter == expected and content and expected_content else (letter, expected)
        )
    if expected_content:
        return answer, expected_content
    if content:
        return content, reference
    letters = _several(reference)
    return (_several(answer) or answer, letters) if letters else (answer, reference)


def _several(text: str) -> str:
    """Return "A, C" for letters of options in their order, such as AC, "A, C" or "A and C"; else ""."""
    text = half_width(text.strip())
    if len(text) > 60 or not _LETTER_LIST.fullmatch(text):
        return ""
    letters = re.findall(r"[A-J]", text)
    return ", ".join(letters) if len(letters) > 1 and letters == sorted(set(letters)) else ""
