"""The judge's view of the program under test: calls its functions by proxy, enforces its time, and reports."""

import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, NoReturn

from quartet_reward.code.plain import (
    JUDGE_PROXIES,
    OPAQUE_PROXIES,
    Malformed,
    NotPlain,
    Remote,
    RemoteFunction,
    TooLarge,
    ask,
)
from quartet_reward.code.rpc import Channel, Gone, Late, Patience, Peer, from_other_side
from quartet_reward.code.values import is_data
from quartet_reward.sandbox.api import LATE

REPORT_DESCRIPTOR = 4
_LONGEST_REASON = 600
_LONGEST_ERROR = 300
_LONGEST_SHOWN = 120
_LONGEST_BEGIN = 0.1

_passed: int | None = None  # of the judgment under way


class Finding(StrEnum):
    """The judge's finding."""

    PASSED = "passed"
    """Every test passed."""
    WRONG = "wrong"
    """A test failed, or the program's answer was invalid."""
    RAISED = "raised"
    """The program raised where the test did not expect it."""
    OUT_OF_MEMORY = "out_of_memory"
    """The program raised MemoryError."""
    NOT_COMPILED = "not_compiled"
    """The program does not compile."""
    LATE = "late"
    """The program did not answer, and had not got the processor time that it may use: this machine is too busy."""
    GONE = "gone"
    """The program's process ended; its Execution says how."""
    BAD_TEST = "bad_test"
    """The test is broken: it does not compile, fails before it calls the program, or never calls it."""


@dataclass(frozen=True, slots=True)
class Report:
    """The judge's final report."""

    finding: Finding
    reason: str
    passed: int | None = None
    """Cases that passed before the finding; None: the test has no cases."""


class Decided(Exception):
    """Raised in the judge to end the judgment."""

    def __init__(self, finding: Finding, reason: str):
        super().__init__(reason)
        self.report = Report(finding, reason)


def describe(error: BaseException) -> str:
    """Return an exception's type and text; only the type if the text raises, as an object of the program may."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"[:_LONGEST_ERROR]
    except Exception:
        return name


def shown(value: Any) -> str:
    """Return the beginning of a value's text; only its type if it has no text, as a number that is too long."""
    try:
        return repr(value[:_LONGEST_SHOWN] if type(value) is str else value)[:_LONGEST_SHOWN]
    except Exception:
        return f"of type {type(value).__name__}"


def report_begun(begun: bool = True) -> None:
    """Report whether from now on an abnormal end of the judge may be the program's doing."""
    _write({"begun": begun})


def report_late(waited: float, allowed: float) -> None:
    """Ask the service whether the program has used up its time; if so, the service kills it."""
    os.write(REPORT_DESCRIPTOR, LATE + f"{waited:.3f} {allowed:.3f}\n".encode())


def count_passed(cases: int | None) -> None:
    """Set how many cases have passed, for the final report. None: the test has no cases."""
    global _passed
    _passed = cases


def send(report: Report) -> None:
    _write(asdict(replace(report, passed=_passed, reason=report.reason[:_LONGEST_REASON])))


def _write(message: dict) -> None:
    os.write(REPORT_DESCRIPTOR, json.dumps(message).encode() + b"\n")


def read_report(written: bytes) -> tuple[bool, Report | None]:
    """Return what `report_begun` reported last, and the final report, None if the judge ended without one.

    Raises:
        ValueError, KeyError: it is not a judge's report.
    """
    begun, last = False, None
    for line in written.splitlines():
        if line.startswith(LATE):
            continue
        message = json.loads(line)
        if "finding" in message:
            last = Report(Finding(message["finding"]), message["reason"], message.get("passed"))
        else:
            begun = message["begun"]
    return begun, last


class Program:
    """The program under test, for the tests."""

    def __init__(self, seconds: float, total_seconds: float, channel: Channel, *, strict: bool, own_data: bool = False):
        """Connect to the program.

        Args:
            seconds: how long the tests wait for the program in a case; the first one includes the program's start.
            total_seconds: the same for all cases.
            channel: to the program.
            strict: the test gets and passes only plain data, functions and iterators; other objects are opaque.
            own_data: all arguments come from the reference.
        """
        self.strict = strict
        self._channel = channel
        self._peer = _ExitingPeer(self._channel, _serve, OPAQUE_PROXIES if strict else JUDGE_PROXIES, not strict)
        self._peer.own_data = own_data
        self._seconds = seconds
        self._in_all = Patience(total_seconds, report_late)
        self._asked = False

    def begin(self, names: Collection[str] = (), path: str = "") -> tuple[dict[str, Any], Any]:
        """Wait until the program is compiled, and run it.

        Returns:
            Those of `names` that it defines, and its function `path`: the name of a function, or `Solution().name`.

        Raises:
            Decided: the program does not compile, raises, or has no such function.
        """
        report_begun()
        began = time.process_time()
        self.begin_case()
        message = _or_end(self._channel.receive)
        if message.get("compile_error") is not None:
            raise Decided(Finding.NOT_COMPILED, str(message["compile_error"]))
        try:
            answer = self._ask("begin", sorted(names), path)
        except MemoryError:
            raise Decided(Finding.OUT_OF_MEMORY, "the program ran out of memory") from None
        except Exception as error:
            raise Decided(Finding.RAISED, f"the program raised {describe(error)}") from None
        match answer:
            case (dict(found), [*functions]) if set(found) <= set(names):
                pass
            case _:
                raise Decided(Finding.WRONG, "the program's process sent an invalid answer")
        if path and not functions:
            raise Decided(Finding.RAISED, f"the program does not define '{path}'")
        # A test that got only distinct functions has learned nothing of the program before it calls one. But a program
        # whose message is long to read may have used up the test's own time.
        proxies = [*found.values(), *functions]
        took_long = time.process_time() - began > _LONGEST_BEGIN
        self._asked = (
            took_long
            or len(set(map(id, found.values()))) < len(found)
            or any(not isinstance(each, RemoteFunction) for each in proxies)
        )
        return found, functions[0] if path else None

    def begin_case(self) -> None:
        self._channel.patience = [Patience(self._seconds, report_late), self._in_all]

    def find(self, path: str) -> Any:
        """Return the program's function `path`, or that method of its class Solution. Raises Decided if it has none."""
        try:
            return self._ask("find", path, True)
        except Exception as error:
            raise Decided(Finding.RAISED, f"the program has no '{path}': {describe(error)}") from None

    def accepts(self, function: Any, count: int) -> bool:
        """Return whether the function's signature takes so many arguments."""
        try:
            return self._ask("accepts", function, count) is True
        except Exception:  # e.g. the program's own __signature__ raises
            return False

    def answer(self, function: Any, arguments: list) -> Any:
        """Return a function's answer as data. Raises what the program raises, and Decided: the answer is not data."""
        # A builtin type, such as `int`, is not a proxy.
        found = ask(function, "answer", *arguments) if isinstance(function, Remote) else function(*arguments)
        try:
            if is_data(found):
                return found
        except RecursionError:
            raise Decided(Finding.WRONG, "the answer is nested too deep") from None
        raise Decided(Finding.WRONG, f"the answer holds functions or objects, which are no data: {shown(found)}")

    def was_called(self) -> bool:
        """Return whether a test has used an object of the program, or got a value that is not a function."""
        return self._asked or self._peer.called

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return self._peer.ask(None, operation, *arguments)


class _ExitingPeer(Peer):
    """Ends the process on protocol errors: raised as exceptions, a test might expect or catch them."""

    called = False
    own_data = False
    """Whether all arguments come from the reference."""

    def ask(self, number: int | None, operation: str, *arguments: Any, **named: Any) -> Any:
        first = number is not None and not self.called
        if first:
            self.called = True
            report_begun()
        try:
            return _or_end(lambda: Peer.ask(self, number, operation, *arguments, **named))
        except TooLarge as error:
            # Later arguments may contain the program's earlier answers.
            finding = Finding.BAD_TEST if first or self.own_data else Finding.WRONG
            end(Report(finding, f"the test's arguments are too large: {error}"))
        except NotPlain as error:
            end(Report(Finding.BAD_TEST, f"the test passes {error}"))
        except (StopIteration, StopAsyncIteration) as error:
            if operation == "next":
                raise
            # As in PEP 479: StopIteration would silently end a loop of the test, such as `all(map(f, …))`.
            raise from_other_side(RuntimeError(f"{type(error).__name__} in a call")) from error


def _serve(target: Any, operation: str, arguments: tuple, named: dict[str, Any]) -> Any:
    """Serve the program: it may call functions and advance iterators that the test passed to it, nothing else."""
    if operation == "call" and callable(target):
        try:
            return target(*arguments, **named)
        except AssertionError:  # the program could catch it
            end(Report(Finding.WRONG, "an assertion fails in a function that the test passed to the program"))
    if operation == "next" and hasattr(type(target), "__next__"):
        return next(target)
    raise Malformed(f"the program asked for '{operation[:80]}' of an object of the test")


def _or_end(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Malformed as error:
        end(Report(Finding.WRONG, f"the program's answer is refused: {error}"))
    except Gone:
        end(Report(Finding.GONE, "the program's process ended before it had answered"))
    except Late:
        end(Report(Finding.LATE, "this machine is too busy: the program did not answer, and had little processor time"))


def end(last: Report) -> NoReturn:
    """Report and end this process at once, so that the test cannot catch it."""
    send(last)
    os._exit(0)
