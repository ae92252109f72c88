"""The letter that an answer to a multiple-choice question chooses."""

import re
from collections.abc import Sequence

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
