"""Is what a program printed what was expected?"""

from quartet_reward.code.values import close, match_in_any_order


def same_output(found: str, expected: str, *, by_tokens: bool, any_order: bool, tolerance: float) -> bool:
    """True if two outputs are the same.

    Args:
        by_tokens: compare what white space separates; else lines, without the white space at their ends and without
            the empty lines at the end.
        any_order: the tokens, or lines, may come in any order.
        tolerance: numbers may differ by so much, or by that share of the expected one; every other token must be the
            same. 0: the text counts.
    """
    ours, theirs = _parts(found, by_tokens), _parts(expected, by_tokens)
    if ours == theirs:
        return True
    if any_order:
        return match_in_any_order(ours, theirs, lambda one, other: _close_parts(one, other, tolerance))
    return len(ours) == len(theirs) and all(
        _close_parts(one, other, tolerance) for one, other in zip(ours, theirs, strict=True)
    )


def _parts(text: str, by_tokens: bool) -> list[str]:
    if by_tokens:
        return text.split()
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _close_parts(found: str, expected: str, tolerance: float) -> bool:
    if found == expected or not tolerance:
        return found == expected
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(
        one == other or _close_numbers(one, other, tolerance) for one, other in zip(ours, theirs, strict=True)
    )


def _close_numbers(found: str, expected: str, tolerance: float) -> bool:
    try:
        return close(float(found), float(expected), tolerance)
    except ValueError:
        return False
