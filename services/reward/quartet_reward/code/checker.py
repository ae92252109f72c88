"""Checker programs: a problem's own way to tell right from wrong, where several answers are right.

A checker defines `check(input, output, expected)`. For programs that read standard input all three are text; for
functions they are the list of arguments, the result and the expected result. It returns True or False.
"""

from collections.abc import Callable
from typing import Any

from quartet_reward.code.report import Finding, Verdict, describe, tell_begun

Check = Callable[[Any, Any, Any], bool]


def load(source: str) -> Check:
    """Return a checker program's function. Raises Verdict if it cannot be used."""
    namespace: dict[str, Any] = {"__name__": "__checker__"}
    try:
        exec(compile(source, "<checker>", "exec", dont_inherit=True), namespace)
    except Exception as error:
        raise Verdict(Finding.BAD_TEST, f"the checker program fails: {describe(error)}") from None
    function = namespace.get("check")
    if not callable(function):
        raise Verdict(Finding.BAD_TEST, "the checker program defines no function check(input, output, expected)")

    def check(given: Any, output: Any, expected: Any) -> bool:
        verdict = function(given, output, expected)
        if type(verdict) is not bool:
            raise TypeError(f"the checker returned {type(verdict).__name__}; it must return a bool")
        return verdict

    return check


def require_usable(check: Check, given: Any, expected: Any) -> None:
    """Raise Verdict unless the checker accepts the expected answer: then what it says of others can be believed.

    Where nothing is expected (empty text, None) there is nothing to try it on.
    """
    if expected is None or expected == "":
        return
    try:
        accepted = check(given, expected, expected)
    except Exception as error:
        raise Verdict(Finding.BAD_TEST, f"the checker raises on the expected answer: {describe(error)}") from None
    if not accepted:
        raise Verdict(Finding.BAD_TEST, "the checker does not accept the expected answer")


def accepts(check: Check, given: Any, output: Any, expected: Any) -> bool:
    """True if the checker accepts an answer. Raises Verdict if it cannot read the answer."""
    try:
        return check(given, output, expected)
    except Exception as error:
        raise Verdict(Finding.WRONG, f"the checker cannot read the answer: {describe(error)}") from None


def judge_output(checker: str, input: str, output: str, expected: str) -> None:
    """Judge what a program printed. Raises Verdict if it is wrong."""
    check = load(checker)
    require_usable(check, input, expected)
    tell_begun()
    if not accepts(check, input, output, expected):
        raise Verdict(Finding.WRONG, "the checker does not accept the output")
