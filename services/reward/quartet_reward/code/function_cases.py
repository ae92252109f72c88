"""Cases with JSON arguments and JSON results, as in LeetCode-style data and ColossalChat's `fn_name`."""

import json
import sys
from collections.abc import Callable
from typing import Any

from quartet_reward.code.program import Decided, Finding, Program, count_passed, describe, report_begun, shown
from quartet_reward.code.values import Compare, OutputComparison, plain, same, same_output

Check = Callable[[Any, Any, Any], bool]


def load(source: str) -> Check:
    """Return the `check` function of a checker program. Raises Decided if it cannot be used."""
    namespace: dict[str, Any] = {"__name__": "__checker__"}
    try:
        exec(compile(source, "<checker>", "exec", dont_inherit=True), namespace)
    except Exception as error:
        raise Decided(Finding.BAD_TEST, f"the checker program fails: {describe(error)}") from None
    function = namespace.get("check")
    if not callable(function):
        raise Decided(Finding.BAD_TEST, "the checker program defines no function check(input, output, expected)")

    def check(given: Any, output: Any, expected: Any) -> bool:
        verdict = function(given, output, expected)
        if type(verdict) is not bool:
            raise TypeError(f"the checker returned {type(verdict).__name__}; it must return a bool")
        return verdict

    return check


def require_usable(check: Check, given: Any, expected: Any) -> None:
    """Raise Decided (BAD_TEST) if the checker rejects the expected answer. Empty expected answers are not tried."""
    if expected is None or expected == "":
        return
    try:
        accepted = check(given, expected, expected)
    except Exception as error:
        raise Decided(Finding.BAD_TEST, f"the checker raises on the expected answer: {describe(error)}") from None
    if not accepted:
        raise Decided(Finding.BAD_TEST, "the checker does not accept the expected answer")


def accepts(check: Check, given: Any, output: Any, expected: Any) -> bool:
    """Return whether the checker accepts an answer. Raises Decided if it raises on the answer."""
    try:
        return check(given, output, expected)
    except Exception as error:
        raise Decided(Finding.WRONG, f"the checker cannot read the answer: {describe(error)}") from None


def judge_output(checker: str, input: str, expected: str, compare: Compare, tolerance: float) -> None:
    """Check what a program printed, which is read from standard input. Raises Decided if it is wrong."""
    check = load(checker) if checker else None
    if check is not None:
        require_usable(check, input, expected)
    report_begun()
    output = sys.stdin.buffer.read().decode(errors="replace")
    if check is None:
        if not same_output(output, expected, OutputComparison.of(compare, tolerance)):
            raise Decided(Finding.WRONG, f"the output {shown(output)} is not what is expected")
    elif not accepts(check, input, output, expected):
        raise Decided(Finding.WRONG, "the checker does not accept the output")


def judge(
    program: Program,
    entry_point: str,
    cases: list[tuple[str, str]],
    arguments: str,
    compare: Compare,
    tolerance: float,
    checker: str,
) -> None:
    """Call the function with each case's arguments; return if all results are right.

    Args:
        cases: the arguments and the expected result of each, as JSON.
        arguments: `list`, `lines` or `auto`, see docs/code.md.

    Raises:
        Decided: for the first wrong result, or because the cases cannot be used.
    """
    count_passed(0)
    comparison = OutputComparison.of(compare, tolerance)
    check = load(checker) if checker else None
    readings = _readings([given for given, _ in cases], arguments)
    expected_results = [_loads(text) for _, text in cases]
    if check is not None:
        readings = _usable(check, readings, [given for given, _ in cases], expected_results)
    program.begin()
    reading = _fitting(readings, program, entry_point, cases[0][0])
    # Some datasets wrap every result in a list of one.
    wrapped = reading is _list_of_all and all(type(each) is list and len(each) == 1 for each in expected_results)
    for index, ((given, _), expected) in enumerate(zip(cases, expected_results, strict=True)):
        where = f"case {index + 1} of {len(cases)}"
        if index:
            program.begin_case()
        found = _call(program, entry_point, reading(given), where)
        if check is not None:
            right = accepts(check, reading(given), found, expected)
        else:
            right = _same(found, [expected, *expected] if wrapped else [expected], comparison)
        if not right:
            raise Decided(Finding.WRONG, f"{where}: the result {shown(found)} is wrong")
        count_passed(index + 1)


def _same(found: Any, allowed: list[Any], comparison: OutputComparison) -> bool:
    try:
        result = plain(found)
        return any(same(result, plain(each), comparison) for each in allowed)
    except Exception:  # not a JSON value: a signaling NaN, nested too deep, a number too long
        return False


def _function(program: Program, entry_point: str) -> Any:
    function = program.find(entry_point)
    if not callable(function):
        raise Decided(Finding.RAISED, f"the program's '{entry_point}' is not a function")
    return function


def _call(program: Program, entry_point: str, arguments: list, where: str) -> Any:
    function = _function(program, entry_point)
    try:
        return program.answer(function, arguments)
    except Decided as verdict:
        raise Decided(verdict.report.finding, f"{where}: {verdict.report.reason}") from None
    except MemoryError:
        raise Decided(Finding.OUT_OF_MEMORY, f"{where}: the program ran out of memory") from None
    except Exception as error:
        raise Decided(Finding.RAISED, f"{where}: the program raised {describe(error)}") from None


Reading = Callable[[str], list]


def _readings(inputs: list[str], arguments: str) -> list[Reading]:
    """Return the possible ways to read the inputs as arguments, the likelier one first."""
    for each in inputs:
        for line in each.splitlines():
            _loads(line)
    if arguments == "lines" or (arguments == "auto" and any("\n" in each.strip() for each in inputs)):
        return [_one_a_line]
    lists = [_loads(each) for each in inputs]
    if arguments == "list":
        if not all(type(each) is list for each in lists):
            raise Decided(Finding.BAD_TEST, "an input is not a JSON list of arguments")
        return [_list_of_all]
    lengths = {len(each) if type(each) is list else None for each in lists}
    if None in lengths or len(lengths) > 1:
        return [_one_a_line]
    return [_list_of_all, _one_a_line]


def _usable(check: Check, readings: list[Reading], inputs: list[str], expected_results: list[Any]) -> list[Reading]:
    """Return the readings with which the checker accepts all expected results. Raises Decided if there are none."""
    usable, refusal = [], None
    for reading in readings:
        try:
            for given, expected in zip(inputs, expected_results, strict=True):
                require_usable(check, reading(given), expected)
            usable.append(reading)
        except Decided as verdict:
            refusal = refusal or verdict
    if refusal and not usable:
        raise refusal
    return usable


def _fitting(readings: list[Reading], program: Program, entry_point: str, given: str) -> Reading:
    """Choose by the function's signature: a list of two may be two arguments, or one argument that is a list."""
    if len(readings) == 1:
        return readings[0]
    count = len(readings[0](given))
    if count != 1:
        function = _function(program, entry_point)
        if not program.accepts(function, count) and program.accepts(function, 1):
            return readings[1]
    return readings[0]


def _one_a_line(given: str) -> list:
    arguments = [_loads(line) for line in given.splitlines() if line.strip()]
    return [_integer_keys(each) for each in arguments]


def _list_of_all(given: str) -> list:
    return [_integer_keys(each) for each in _loads(given)]


def _integer_keys(argument: Any) -> Any:
    """Convert the keys of an object to integers if all of them are numerals: JSON has only text keys."""
    if type(argument) is not dict or not argument:
        return argument
    try:
        return {int(key): value for key, value in argument.items()}
    except ValueError:
        return argument


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Decided(Finding.BAD_TEST, f"{shown(text)} is not JSON: {error}") from None
