"""Assert-style test programs: HumanEval's `check(candidate)`, MBPP's bare asserts, and what `collected` runs.

The test runs here, in the judge. In strict mode it gets a proxy of the function under test only; its other names are
defined before the program runs: by the test, the standard library, or the code that completions continue. Otherwise it
gets proxies of all names that it uses and does not define, and no others, or the program could replace `set`.
"""

import importlib
import sys
import types
from typing import Any

from quartet_reward.code.collected import Collection
from quartet_reward.code.marked import mark
from quartet_reward.code.names import BUILTINS, MODULES, USUAL_NAMES, avoids, module_names, read_names, starred
from quartet_reward.code.program import Decided, Finding, Program, describe, report_begun

_FILE = "<test>"


def judge(program: Program, source: str, entry_point: str, prefix: str) -> None:
    """Run a test program; return if every test passed.

    Args:
        program: the program under test.
        source: the test.
        entry_point: the function under test; empty: inferred from the names that the test uses.
        prefix: the code that completions continue; in strict mode the test may use what it defines.

    Raises:
        Decided: a test failed, or the test program cannot be used.
    """
    try:
        code, marks = mark(source, _FILE)
        names = read_names(source, _FILE, entry_point)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Decided(Finding.BAD_TEST, f"the test program does not compile: {error}") from None
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    namespace = vars(module)
    namespace |= marks.namespace | {"__file__": _FILE}
    namespace |= {name: USUAL_NAMES[name] for name in names.usual}
    namespace |= {name: _module(name) for name in names.modules}
    if program.strict:
        helpers = _helpers(prefix, (names.unknown | names.usual) - {entry_point, entry_point.partition("()")[0]})
        entry_point = _under_test(source, entry_point, names.unknown - helpers.keys())
        namespace |= helpers | _class_of(program, entry_point)
        wanted = names.unknown & {entry_point}
    else:
        wanted = names.unknown | names.hidden
    if names.checks and not entry_point and len(wanted) != 1:
        raise Decided(Finding.BAD_TEST, "check takes a function: reference.entry_point must name it")
    if not marks.assertions:
        raise Decided(Finding.BAD_TEST, "the test program asserts nothing")
    found, function = program.begin(wanted, entry_point)
    if names.hidden and len(found) > 1:
        raise Decided(Finding.WRONG, f"the program defines {' and '.join(found)}; the test calls the builtins")
    if wanted and not (found or entry_point):
        raise _undefined(wanted)
    namespace |= found
    lacking = wanted - names.hidden - set(found)
    if not entry_point and len(wanted) == 1:
        (function,) = found.values()
    report_begun(program.was_called())
    collection = Collection(marks, namespace, function)
    collection.replace_main()
    try:
        for run in (lambda: exec(code, namespace), collection.run):
            try:
                run()
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise Decided(Finding.WRONG, f"the test program ended with status {error.code}") from None
    except Decided as verdict:
        if verdict.report.finding is Finding.BAD_TEST or program.was_called():
            raise
    except BaseException as error:
        raise _verdict(error, program, lacking) from None
    if not program.was_called():
        if lacking:
            raise _undefined(lacking)
        raise Decided(Finding.BAD_TEST, "the test program ended without calling the program")


def _undefined(names: set[str]) -> Decided:
    return Decided(Finding.RAISED, f"the program does not define {' or '.join(sorted(names))}, which the test uses")


def _helpers(prefix: str, names: set[str]) -> dict[str, Any]:
    """Return the definitions of `names` in `prefix`, the code that completions continue."""
    if not prefix or not names:
        return {}
    namespace: dict[str, Any] = {"__name__": "__prefix__", "__builtins__": BUILTINS}
    try:
        try:
            code = compile(prefix, "<prefix>", "exec", dont_inherit=True)
        except SyntaxError:  # it may end before a function's body
            code = compile(f"{prefix}\n{' ' * 100}pass", "<prefix>", "exec", dont_inherit=True)
        exec(code, namespace)
    except BaseException as error:
        reason = f"`prefix`, of which the test may use {_listed(names)}, fails: {describe(error)}"
        raise Decided(Finding.BAD_TEST, reason) from None
    return {name: namespace[name] for name in names & namespace.keys()}


def _under_test(source: str, entry_point: str, undefined: set[str]) -> str:
    """Return the only function of the program that a strict test uses."""
    others = undefined - {entry_point, entry_point.partition("()")[0]}
    if others:
        others.difference_update(*(module_names(_module(each)) for each in starred(source)))
    if not others:
        return entry_point
    if len(others) == 1 and avoids(source, _FILE, entry_point):  # CodeT's MBPP names each solution's first function
        return others.pop()
    raise Decided(
        Finding.BAD_TEST,
        f"the test uses {_listed(others)}, and of the program only {entry_point}: define the rest in the test or in "
        "`prefix`, or set strict = false",
    )


def _class_of(program: Program, entry_point: str) -> dict[str, Any]:
    name, called, method = entry_point.partition("().")
    return {name: lambda: types.SimpleNamespace(**{method: program.find(entry_point)})} if called else {}


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(MODULES.get(name, name))
    except Exception as error:
        raise Decided(Finding.BAD_TEST, f"the test program's module {name} cannot be imported: {error}") from None


def _verdict(error: BaseException, program: Program, lacking: set[str]) -> Decided:
    shown, line = describe(error), _line(error)
    if getattr(error, "from_other_side", False):
        if isinstance(error, MemoryError):
            return Decided(Finding.OUT_OF_MEMORY, f"the program ran out of memory {line}")
        return Decided(Finding.RAISED, f"the program raised {shown} {line}")
    if isinstance(error, NameError) and error.name in lacking:
        return _undefined({error.name})
    if lacking and not program.was_called():
        return _undefined(lacking)
    if isinstance(error, AssertionError) and program.was_called():
        return Decided(Finding.WRONG, f"the assertion {line} fails")
    if program.was_called():
        return Decided(Finding.WRONG, f"the test ended with {shown} {line}")
    return Decided(Finding.BAD_TEST, f"before it called the program, the test ended with {shown} {line}")


def _line(error: BaseException) -> str:
    trace, line = error.__traceback__, 0
    while trace:
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"in line {line} of the test" if line else "in the test"
