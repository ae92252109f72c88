"""Answers in plain words ("east", "\\text{Evelyn}"): equal if they are the same words, whatever the case.

Decided apart from mathematics because a symbolic library reads a word as a product of letters, where "east" is "seat".
"""

import re

_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}\\]*)\}")
# A time on the hour; with other minutes it might be a ratio.
_HOUR = re.compile(r"(\d{1,2}):00(?:\s*([ap])\.?m\.?)?", re.IGNORECASE | re.ASCII)
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?:\s*([ap])\.?m\.?)?", re.IGNORECASE | re.ASCII)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '’-]+[^\W\d_]+)*\.?")

# Words that stand for mathematics: left to math-verify.
_MATHEMATICAL = frozenset(
    re.findall(
        r"\w+",
        """
        sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt lim max min mod gcd lcm det
        inf infty infinity infinite undefined none null nan true false empty oplus
        alpha beta gamma delta epsilon zeta eta theta iota kappa lambda omicron rho sigma tau upsilon phi chi psi omega
        degree degrees percent dollars cents or and union cup cap pmatrix
        """,
    )
)


def read_words(text: str) -> str | None:
    """Return the words of `text` in a form to compare, or None if it is not merely words."""
    if len(text) > 500:
        return None
    text = text.strip().strip("$").strip()
    if match := _TEXT_COMMAND.fullmatch(text):
        text = match[1].strip()
    if not _WORDS.fullmatch(text):
        return None
    words = re.split(r"[ '’-]+", text.rstrip(".").casefold())
    if _MATHEMATICAL.intersection(words) or _may_be_product("".join(words)):
        return None
    return " ".join(words)


def same_hour(answer: str, reference: str) -> bool | None:
    """Return whether two times of day are the same, None if the reference is no time on the hour, such as 12:00."""
    expected = _HOUR.fullmatch(reference.strip().strip("$").strip())
    found = _CLOCK.fullmatch(answer.strip().strip("$").strip())
    if expected is None:
        return None
    same = _CLOCK.fullmatch(expected[0])
    return found is not None and same is not None and same.groups() == found.groups()


def _may_be_product(letters: str) -> bool:
    """Return True for "x", "abc", "pqrs": names of variables side by side rather than a word."""
    ordered = sorted(map(ord, letters))
    return len(letters) < 4 or ordered[-1] - ordered[0] == len(letters) - 1
