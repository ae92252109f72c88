"""Answers whose equality is decided exactly, at once, without a symbolic library.

Numbers, closed forms, and what is made of them: tuples, intervals and their unions, lists, sets, matrices, `x = …`,
degrees, quantities with units, numbers of another base, letters of a choice. A verdict is given only where both sides
are unambiguously of these; all else is left to math-verify.
"""

import re
from collections.abc import Callable, Iterable

from quartet_reward.closed_forms import equal_closed_forms, parse_closed_form
from quartet_reward.equality_policy import EqualityPolicy
from quartet_reward.notation import (
    bracketed_list,
    quantity_of,
    sides_of_equation,
    split_outside_brackets,
    without_decoration,
)
from quartet_reward.rationals import equal_rationals, parse_rational
from quartet_reward.terms import Terms, Undecided, subtract

# Longer answers than these are not plain; the whole of this module is linear in them.
_MOST_CHARACTERS = 400
_MOST_ELEMENTS = 40

_COMMA, _CUP = frozenset([","]), frozenset([r"\cup"])
_INFINITIES = {r"\infty": 1, r"+\infty": 1, r"-\infty": -1, "∞": 1, "+∞": 1, "-∞": -1}
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°|\\text\s*\{\s*degrees?\s*\}|(?<=\d)\s+degrees?)$")
_BASED = re.compile(r"(\d{1,40})_(?:\{(\d{1,2})\}|(\d))", re.ASCII)
_MEMBER = re.compile(r"([a-zA-Z])\s*\\in(?![a-zA-Z])\s*(.*)", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{([pbvB]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_CHOICE = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?(\()?([A-J])(?(1)\))\s*\}?\.?")

Decision = bool | None


def decide(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    """Return whether the answer equals the reference, or None if that is not plain."""
    if max(len(answer), len(reference)) > _MOST_CHARACTERS:
        return None
    return _decide(without_decoration(answer), without_decoration(reference), policy)


def _decide(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    decided = _decide_value(answer, reference, policy)
    for way in _WAYS if decided is None else ():
        decided = way(answer, reference, policy)
        if decided is not None:
            break
    return decided


def _decide_value(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    expected_number, found_number = parse_rational(reference), parse_rational(answer)
    if expected_number is not None and found_number is not None:
        return equal_rationals(found_number, expected_number, policy.decimal_places)
    expected = parse_closed_form(reference)
    found = None if expected is None else parse_closed_form(answer)
    if expected is None or found is None:
        return None
    equal = equal_closed_forms(found, expected)
    return None if policy.any_names and not equal else equal


def _decide_equation(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    """`x = 5` is answered by `x = 5` and by `5`; `5` by `x = 5`."""
    expected, found = sides_of_equation(reference), sides_of_equation(answer)
    if max(len(expected), len(found)) != 2:
        return None
    for sides in (expected, found):
        if len(sides) == 2 and not (len(sides[0]) == 1 and sides[0].isalpha() and sides[0] not in sides[1]):
            return None  # no definition: x + 1 = 5, or x = x
    if len(expected) == len(found) and expected[0] != found[0]:
        return None
    return _decide(found[-1], expected[-1], policy)


def _decide_relation(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    """Equations that are multiples of one another, such as `2x - y = 3` and `y = 2x - 3`, are the same.

    But `x = 5` is not answered by `2x = 10`, which is not solved.
    """
    expected, found = _equation(reference), _equation(answer)
    if expected is None or found is None or expected.keys() != found.keys():
        return None
    monomial = next(iter(expected))
    factor = found[monomial] / expected[monomial]
    if any(value != factor * expected[key] for key, value in found.items()):
        return None
    unknowns = {name for _, powers in expected for name, _ in powers}
    return len(unknowns) > 1 or not _is_solved(reference) or _is_solved(answer)


def _equation(text: str) -> Terms | None:
    """Return left minus right side of an equation between closed forms, or None if there is no variable in it."""
    sides = [parse_closed_form(side) for side in sides_of_equation(text)]
    if len(sides) != 2 or sides[0] is None or sides[1] is None or sides[0].decimal or sides[1].decimal:
        return None
    try:
        difference = subtract(sides[0].terms, sides[1].terms)
    except Undecided:
        return None
    return difference if any(powers for _, powers in difference) else None


def _is_solved(text: str) -> bool:
    return any(len(side) == 1 and side.isalpha() for side in sides_of_equation(text))


def _decide_member(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    expected, found = _MEMBER.fullmatch(reference), _MEMBER.fullmatch(answer)
    if not (expected or found) or (expected and found and expected[1] != found[1]):
        return None
    return _decide(found[2] if found else answer, expected[2] if expected else reference, policy)


def _decide_brackets(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    expected, found = bracketed_list(reference), bracketed_list(answer)
    if expected is None or found is None or expected[0] != found[0]:
        return None
    if expected[0] == r"\{\}":
        return _same_elements(found[1], expected[1])
    if len(expected[1]) != len(found[1]) or len(found[1]) > _MOST_ELEMENTS:
        return None
    return _all(_decide_end(one, two, policy) for one, two in zip(found[1], expected[1], strict=True))


def _decide_end(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    ends = [_INFINITIES.get("".join(text.split())) for text in (answer, reference)]
    if ends[0] is None and ends[1] is None:
        return _decide_value(answer, reference, policy)
    if None in ends and parse_closed_form(reference if ends[0] else answer) is None:
        return None
    return ends[0] == ends[1]


def _decide_union(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    expected, found = (split_outside_brackets(text, _CUP) for text in (reference, answer))
    if len(expected) < 2 or len(expected) != len(found) or len(found) > _MOST_ELEMENTS:
        return None
    same = _all(_decide_brackets(one, two, policy) for one, two in zip(found, expected, strict=True))
    return same or None  # another order may say the same


def _decide_list(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    expected, found = (split_outside_brackets(text, _COMMA) for text in (reference, answer))
    one_each = len(expected) == len(found) == 1
    if (one_each and r"\pm" not in reference + answer) or policy.any_names or (len(expected) == 1) != (len(found) == 1):
        return None
    return _same_elements(found, expected)


def _decide_matrix(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    expected, found = _MATRIX.fullmatch(reference), _MATRIX.fullmatch(answer)
    if expected is None or found is None or expected[1] != found[1]:
        return None
    rows = [
        [row.split("&") for row in match[2].strip().removesuffix(r"\\").split(r"\\")] for match in (found, expected)
    ]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]] or sum(map(len, rows[0])) > _MOST_ELEMENTS:
        return None
    pairs = zip((cell for row in rows[0] for cell in row), (cell for row in rows[1] for cell in row), strict=True)
    return _all(_decide_value(one.strip(), two.strip(), policy) for one, two in pairs)


def _decide_degrees(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    """A degree sign that is missing on one side is forgiven."""
    plain = [_DEGREES.sub("", text) for text in (answer, reference)]
    if plain == [answer, reference]:
        return None
    values = [parse_closed_form(text) for text in plain]
    if any(value is None or set(value.terms) - {(1, ())} for value in values):
        return None  # an angle in radians
    return _decide_value(plain[0], plain[1], policy)


def _decide_quantity(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    expected, found = quantity_of(reference), quantity_of(answer)
    if expected is None and found is None:
        return None
    if expected is not None and found is not None and expected[1] != found[1]:
        return None  # the units differ; a guard of `math_compare` says so
    return _decide_value(found[0] if found else answer, expected[0] if expected else reference, policy)


def _decide_based(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    expected, found = _BASED.fullmatch(reference), _BASED.fullmatch(answer)
    if expected is None or found is None:
        return None
    return (expected[1].lstrip("0"), expected[2] or expected[3]) == (found[1].lstrip("0"), found[2] or found[3])


def _decide_choice(answer: str, reference: str, policy: EqualityPolicy) -> Decision:
    expected, found = _CHOICE.fullmatch(reference), _CHOICE.fullmatch(answer)
    if expected is None or found is None:
        return None
    return expected[2] == found[2]


def _same_elements(answers: list[str], references: list[str]) -> Decision:
    """Compare as sets; elements with ± are two."""
    keys, opaque = [], False
    for elements in (answers, references):
        if len(elements) > _MOST_ELEMENTS:
            return None
        these = set()
        for text in (text for element in elements for text in _both_signs(element)):
            form = parse_closed_form(text)
            if form is None or form.decimal:
                return None
            opaque |= form.opaque
            these.add(form.key())
        keys.append(these)
    return keys[0] == keys[1] or (None if opaque else False)


def _both_signs(text: str) -> list[str]:
    return [text.replace(r"\pm", " + "), text.replace(r"\pm", " - ")] if text.count(r"\pm") == 1 else [text]


def _all(decisions: Iterable[Decision]) -> Decision:
    """Return True if all are, False if one is certainly not, None otherwise."""
    undecided = False
    for decision in decisions:
        if decision is False:
            return False
        undecided |= decision is None
    return None if undecided else True


_WAYS: tuple[Callable[[str, str, EqualityPolicy], Decision], ...] = (
    _decide_choice,
    _decide_based,
    _decide_degrees,
    _decide_quantity,
    _decide_equation,
    _decide_relation,
    _decide_member,
    _decide_matrix,
    _decide_union,
    _decide_brackets,
    _decide_list,
)
