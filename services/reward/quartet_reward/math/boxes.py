"""Joins the boxes of a completion that together are its answer: a list, alternatives, or sides of one equation."""

import re

from quartet_reward.answer_extraction import Box, boxes

# Long enough for "and", a name and an equals sign between two boxes of a list, too short for a sentence.
_LONGEST_BETWEEN = 48
_SENTENCE_END = re.compile(r"[.!?。！？]\s|\n\s*\n")
# Without a comma, boxes on different lines or in different displays are steps.
_LISTED = re.compile(
    r"(?:[\s$.&*+]|\\q?quad|\\[()\[\]\\!: ])*(?:[,;、，；]|\\[,;])(?:[\s$.&*+,;]|\\q?quad|\\[()\[\]\\!: ])*"
)
_ADJACENT = re.compile(r"(?:[ \t.&*+]|\$(?!\$)|\\q?quad|\\[()! ])*")
_OPERATOR = re.compile(
    r"[ \t$]*(?P<sign>[-+*/=<>]|\\(?:cdot|times|div|le|ge|leq|geq|approx|cup|cap)(?![a-zA-Z]))[ \t$]*"
)
_OR = re.compile(r"(?<![^\W_])or(?![^\W_])|或", re.IGNORECASE)
_AND = re.compile(r"(?<![^\W_])and(?![^\W_])|和", re.IGNORECASE)
# Words that make "and" the next step of a computation.
_STEP = re.compile(
    r"\b(?:then|therefore|thus|hence|so|finally|consequently|now|next|we|i|it|this|that|which|"
    r"get|gets|got|give|gives|giving|yields?|obtain|becomes?|leads?|makes?|means|conclude|find|answer|result|total)\b",
    re.IGNORECASE,
)
_NOT = re.compile(r"(?:\b(?:not|never|than|instead of)|n't|不是)[\s$(*\\]*$", re.IGNORECASE)


def joined_boxes(text: str) -> str | None:
    """Return the content of the last box and those that form a list with it; None if there is no box.

    Boxes form a list if only commas and the like stand between them, or a few words with "or", or with "and" unless
    they say that the next box is the next step ("and then \\boxed{9}"). Boxes joined by one operator are one
    expression. A list that is denied ("not \\boxed{8}, or \\boxed{10}") is not the answer.
    """
    found = boxes(text)
    last = len(found) - 1
    while last >= 0:
        first, answer = _list_that_ends_at(found, last, text)
        if first == 0 or not _NOT.search(text, max(found[first].start - 24, 0), found[first].start):
            return answer
        last = first - 1
    return None


def _list_that_ends_at(found: list[Box], last: int, text: str) -> tuple[int, str]:
    """Return where the list that ends with the box of index `last` begins, and the list without repetitions."""
    first, elements, separator = last, [found[last].content], ", "
    while first > 0:
        joint = _joint(text[found[first - 1].end : found[first].start])
        if joint is None:
            break
        first -= 1
        content = found[first].content
        if joint in (", ", " or "):
            elements.append(content)
            separator = " or " if joint == " or " else separator
        else:
            elements[-1] = content + joint + elements[-1]
    return first, separator.join(dict.fromkeys(filter(None, reversed(elements))))


def _joint(between: str) -> str | None:
    """Return what joins two boxes: a comma, "or", an operator; None if they do not belong together."""
    if len(between) > _LONGEST_BETWEEN or _NOT.search(between):
        return None
    if operator := _OPERATOR.fullmatch(between):
        return f" {operator['sign']} "
    if _LISTED.fullmatch(between) or _ADJACENT.fullmatch(between):
        return ", "
    if _SENTENCE_END.search(between):
        return None
    if _OR.search(between):
        return " or "
    return ", " if _AND.search(between) and not _STEP.search(between) else None
