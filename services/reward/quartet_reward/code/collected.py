"""Runs what a test program defines and does not run itself, as pytest and unittest would."""

import inspect
import sys
import types
from typing import Any

from quartet_reward.code.marked import MarkedFunction, Marks
from quartet_reward.code.program import Decided, Finding


class Collection:
    """The functions and classes of a marked test program."""

    def __init__(self, marks: Marks, namespace: dict[str, Any], under_test: Any):
        """`under_test`: what `check` gets."""
        self._marks = marks
        self._namespace = namespace
        self._under_test = under_test
        self._tried: set[int] = set()
        self._passed: set[type] = set()

    def replace_main(self) -> None:
        """Let `unittest.main()` run the classes that are defined by then, with or without a guard around it."""
        unittest = sys.modules["unittest"]

        def main(*_: Any, **__: Any) -> types.SimpleNamespace:
            self._run_unittest()
            return types.SimpleNamespace(result=unittest.TestResult())

        unittest.main = unittest.TestProgram = main  # type: ignore[attr-defined]

    def run(self) -> None:
        """Run all that has not run. Raises what the tests raise, and Decided: a part of the test cannot be run."""
        _call_hook(self._namespace.get("setup_module"), sys.modules["__main__"])
        while (function := self._next()) is not None:
            self._run_function(function)
        self._run_unittest()
        self._run_classes()
        self._require_all()

    def _next(self) -> MarkedFunction | None:
        """Return a function to run; running one may define others."""
        for number, function in enumerate(self._marks.functions):
            if number not in self._tried and not function.entered and self._is_run(function):
                self._tried.add(number)
                return function
        return None

    def _is_run(self, function: MarkedFunction) -> bool:
        if function.owner or not callable(function.value):
            return False
        if function.is_test:
            return not (function.mentioned and _required(function.value))
        return function.asserts and not (function.mentioned or function.decorated or _required(function.value))

    def _run_function(self, function: MarkedFunction) -> None:
        count = _required(function.value)
        if function.name == "check":
            if count > 1:
                raise Decided(Finding.BAD_TEST, f"check takes one function; it takes {count}")
            _await(function.value(*[self._under_test] * count))
            return
        if count:
            raise _with_arguments(function.name, function.value)
        _call_hook(self._namespace.get("setup_function"), function.value)
        _await(function.value())
        _call_hook(self._namespace.get("teardown_function"), function.value)

    def _run_unittest(self) -> None:
        unittest = sys.modules["unittest"]
        for case in self._classes():
            if not issubclass(case, unittest.TestCase) or case in self._passed:
                continue
            result = unittest.TestResult()
            result.failfast = True
            unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
            if not result.wasSuccessful():
                found = result.failures + result.errors
                test, trace = found[0] if found else (case, "it succeeds where it is expected to fail")
                what = Finding.RAISED if result.errors else Finding.WRONG
                raise Decided(what, f"{test}: {trace.strip().splitlines()[-1]}")
            self._passed.add(case)

    def _classes(self) -> list[type]:
        """Return the test program's classes: those that its names still hold, and those within others."""
        within = [each for _, each in self._marks.classes if isinstance(each, type) and "." in each.__qualname__]
        found = [each for each in self._namespace.values() if isinstance(each, type) and each.__module__ == "__main__"]
        return list(dict.fromkeys([*found, *within]))

    def _run_classes(self) -> None:
        """Run the other classes with tests: first those that pytest collects, which may inherit from the rest."""
        case = sys.modules["unittest"].TestCase
        for each in sorted(self._classes(), key=lambda each: not each.__name__.startswith("Test")):
            name = each.__name__
            collected = name.startswith("Test")
            if issubclass(each, case) or not (collected or name not in self._marks.mentioned):
                continue
            own = [one for one in self._marks.functions if one.is_test and one.owner == name]
            if any(not one.entered for one in own) or (collected and not own):
                _run_class(each)

    def _require_all(self) -> None:
        """Raise Decided if a test has not run, by name, or if no assertion has been reached."""
        skipped = {each.__name__ for each in self._classes() if getattr(each, "__unittest_skip__", False)}
        for function in self._marks.functions:
            if function.entered or not function.is_test or function.value is None or function.owner in skipped:
                continue
            if not function.owner and _required(function.value):
                if function.asserts and function.called:
                    raise Decided(Finding.WRONG, f"the test's {function.name} is not reached")
                if function.asserts:
                    raise _with_arguments(function.name, function.value)
                continue
            if function.owner and function.owner in self._marks.mentioned and not function.owner.startswith("Test"):
                continue
            if not getattr(function.value, "__unittest_skip__", False):
                name = f"{function.owner}.{function.name}" if function.owner else function.name
                raise Decided(Finding.BAD_TEST, f"{name} does not run: it is a generator, wrapped, or defined twice")
        if not self._marks.reached:
            if any(self._marks.assertions):
                raise Decided(Finding.WRONG, "no assertion of the test is reached")
            raise Decided(Finding.BAD_TEST, "no assertion of the test program is ever reached")


def _run_class(kind: type) -> None:
    name = kind.__name__
    names = dict.fromkeys(each for base in reversed(kind.__mro__) for each in vars(base))
    tests = [each for each in names if each.startswith("test") and callable(getattr(kind, each))]
    if not tests:
        return
    if kind.__init__ is not object.__init__ and _required(kind):  # type: ignore[misc]
        raise Decided(Finding.BAD_TEST, f"{name} takes arguments ({_parameters(kind)}): its tests cannot be run")
    _call_hook(getattr(kind, "setup_class", None), kind)
    for test in tests:
        one = kind()
        method = getattr(one, test)
        if _required(method):
            raise _with_arguments(f"{name}.{test}", method)
        _call_hook(getattr(one, "setup_method", None), method)
        _await(method())
        _call_hook(getattr(one, "teardown_method", None), method)
    _call_hook(getattr(kind, "teardown_class", None), kind)


def _call_hook(hook: Any, *arguments: Any) -> None:
    """Call a function that prepares or ends tests, if there is one; it may leave out the arguments."""
    if callable(hook):
        hook(*arguments[: len(_required_names(hook))])


def _await(result: Any) -> None:
    if inspect.iscoroutine(result):
        import asyncio  # few tests need it, and it is slow to import

        asyncio.run(result)


def _required_names(function: Any) -> list[str]:
    """Return the parameters without defaults."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return []
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in various]


def _required(function: Any) -> int:
    return len(_required_names(function))


def _parameters(function: Any) -> str:
    return ", ".join(_required_names(function))


def _with_arguments(name: str, function: Any) -> Decided:
    reason = f"{name} takes arguments ({_parameters(function)}), as for fixtures or parametrize: it cannot be run"
    return Decided(Finding.BAD_TEST, reason)
