"""Reads answers in words and in letters whose order counts: `east`, `ABCD`, `\\angle BAC`, `no solution`. Text only."""

import re

CJK = r"\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
TEXT = re.compile(r"\\text\s*\{([^{}\\]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,:'’.-]+[^\W_]+)*[.!]?")
# A product of letters that is written out: a \cdot b, a*b.
_PRODUCT = re.compile(r"[a-zA-Z](?:\s*+(?:(?:\\cdot|\*)\s*+)?[a-zA-Z])++")
# Angles, triangles, segments and the like are named by points in order.
_NAMED_BY_POINTS = re.compile(
    r"m?\s*\\(?:angle|measuredangle|triangle|overline|overrightarrow|overleftrightarrow|vec|widehat|overset\{\\frown\}|"
    r"odot|square)\s*\{?\s*[A-Za-z]'?(?:\s*+[A-Za-z]'?)*+\s*\}?"
)
# Words with a mathematical meaning.
MATHEMATICAL = frozenset(
    re.findall(
        r"\w+",
        """
        sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt frac lim max min mod gcd lcm det
        inf infty infinity oplus begin end
        alpha beta gamma delta epsilon zeta eta theta iota kappa lambda omicron rho sigma tau upsilon phi chi psi omega
        and or union cup cap pmatrix
        """,
    )
)
# Short words: their capitals do not count, while those of letters such as AB and ab do.
_SHORT = frozenset(["yes", "no", "odd", "one", "two", "six", "ten", "red", "all", "any", "not", "on", "off", "up"])
_ARTICLES = re.compile(r"^(?:an?|the|there (?:is|are)) (?=\w)")
# Phrases that say the same; what begins with a backslash is read as mathematics.
_MEANINGS = {
    "does not exist": "dne",
    "doe not exist": "dne",
    "doesn t exist": "dne",
    "no such number exist": "dne",
    "limit does not exist": "dne",
    **dict.fromkeys(["no solution", "no real solution", "empty set", "null set"], r"\emptyset"),
    **dict.fromkeys(["all real number", "all real", "real number", "set of all real number"], r"\mathbb{R}"),
    "all integer": r"\mathbb{Z}",
    **dict.fromkeys(["infinity", "positive infinity"], r"\infty"),
    **dict.fromkeys(["negative infinity", "minus infinity"], r"-\infty"),
}  # fmt: skip


def bare_words(text: str) -> str:
    """Return `text` without `\\text{…}` around its words."""
    return re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)).strip() if "\\text" in text else text


def words_of(text: str) -> str | None:
    """Return words, or letters that are no product, as they are compared; None if `text` is something else.

    Case counts in letters (`AB` is not `ab`) but not in words. A phrase with a mathematical meaning is returned as
    LaTeX, which begins with a backslash or a minus sign: `\\emptyset` for "no solution".
    """
    if _NAMED_BY_POINTS.fullmatch(text):
        return re.sub(r"[\s{}\\]", "", text)
    if (letters := _letters_of(text)) and letters not in MATHEMATICAL:
        return _folded(letters)
    bare = bare_words(text)
    if len(bare) > 500 or not _WORDS.fullmatch(bare):
        return None
    words = re.findall(r"[^\W_]+", bare)
    if max(map(len, words), default=0) < 2 or (len(words) == 1 and words[0].casefold() in MATHEMATICAL - {"infinity"}):
        return None
    folded = _ARTICLES.sub("", " ".join(map(_folded, words)))
    return _MEANINGS.get(" ".join(_singular(word) for word in folded.split()), folded)


def _letters_of(text: str) -> str:
    """Return the letters of `ABC` and `x \\cdot y`; "" for several words, powers (`x \\cdot x`), constants."""
    if not _PRODUCT.fullmatch(text):
        return ""
    factors = re.sub(r"\\cdot|\*", " ", text).split()
    if len(factors) > 1 and any(len(factor) > 1 for factor in factors):
        return ""
    letters = "".join(factors)
    written_out = len(factors) > 1 and (len(set(letters)) < len(letters) or "e" in factors or "i" in factors)
    return "" if written_out else letters


def _folded(word: str) -> str:
    lowered = word.casefold()
    uniform = word in (lowered, word.upper(), lowered.capitalize())
    return lowered if lowered in _SHORT or (uniform and len(word) > 2 and not is_run(lowered)) else word


def is_run(letters: str) -> bool:
    """Return whether letters are neighbors in the alphabet, such as PQRS, in any order."""
    ordered = sorted(map(ord, letters))
    return ordered[-1] - ordered[0] < len(letters)


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
