"""The cases as a pytest run against one server: one test a case, named by the RPC and what is tried."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from quartet_contract.target import Bench, Target

_HERE = Path(__file__).resolve().parent


def run_suite(target: Target, arguments: Sequence[str] = ()) -> int:
    """Try every case that concerns a target, report on standard output, and return pytest's exit status.

    0: all that could be tried passed; 1: some failed; 5: none was chosen by `arguments`, which are pytest's.
    """
    own = [str(_HERE / "implementation.py"), "-c", str(_HERE / "pytest.ini"), "--rootdir", str(_HERE)]
    return int(pytest.main([*own, "-p", "no:cacheprovider", "-q", "-rN", *arguments], plugins=[_Suite(target)]))


class _Suite:
    def __init__(self, target: Target):
        self._target = target

    def pytest_configure(self) -> None:
        # Assertions show what came, if that is asked for before their modules are imported.
        for module in ("cases", "judge", *(f"cases_{path.stem[6:]}" for path in _HERE.glob("cases_*.py"))):
            pytest.register_assert_rewrite(f"quartet_contract.{module}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        from quartet_contract.tables import CASES, name_of

        cases = self._target.cases(CASES)
        metafunc.parametrize("case", cases, ids=[name_of(case) for case in cases])

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        case = item.callspec.params["case"]  # type: ignore[attr-defined]
        item.user_properties.append(("case", f"{case.rpc}: {case.title}"))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for outcome, word in (("skipped", "not tried"), ("failed", "FAILED"), ("error", "FAILED")):
            for report in terminalreporter.getreports(outcome):
                reason = f": {report.longrepr[2].removeprefix('Skipped: ')}" if outcome == "skipped" else ""
                terminalreporter.write_line(f"{word} {dict(report.user_properties).get('case')}{reason}")

    @pytest.fixture(scope="session")
    def bench(self) -> Iterator[Bench]:
        bench = Bench(self._target)
        yield bench
        bench.close()
