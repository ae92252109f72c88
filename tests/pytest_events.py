"""Runs pytest as `python -m pytest` does, and writes each test's start and outcome to a file immediately.

    python tests/pytest_events.py EVENTS ARGUMENTS...

A line of EVENTS is a JSON object: `{"tests": N}`, the number collected; `{"started": ID}`; `{"ended": ID, "outcome":
…, "seconds": …, "error": …, "output": …, "brief": …}` for each of a test's phases (setup, call, teardown), with a
failure's traceback, the captured output, and `brief`: the failing line, the error message and, for a failed command,
the end of its output.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = 1500  # characters of a failed command's output in `brief`


class Events:
    """A plugin that writes the events."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def _write(self, **event: object) -> None:
        print(json.dumps(event), file=self._file, flush=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(tests=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            error = report.longreprtext
            self._write(ended=report.nodeid, outcome="uncollected", seconds=0.0, error=error, output="", brief=error)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if report.failed and call.excinfo:
            report.brief = brief(report, call.excinfo)
        return report

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        error = output = ""
        if report.failed:
            error = report.longreprtext or report.outcome
            output = "\n".join(f"--- {title} ---\n{content}" for title, content in report.sections)
        event = {"ended": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        self._write(**event, error=error, output=output, brief=getattr(report, "brief", error))


def brief(report: pytest.TestReport, raised: pytest.ExceptionInfo) -> str:
    """Return the failing line of the checkout, the message, and the end of a failed command's output."""
    ours = [entry for entry in raised.traceback if is_ours(entry.path)] or raised.traceback
    lines = [f"{ours[-1].path}:{ours[-1].lineno + 1}: {ours[-1].statement}".removeprefix(f"{ROOT}/")]
    crash = getattr(report.longrepr, "reprcrash", None)
    lines.append(crash.message if crash else report.longreprtext)
    if isinstance(raised.value, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        printed = [raised.value.stdout, raised.value.stderr]
        texts = [each.decode(errors="replace") if isinstance(each, bytes) else each for each in printed if each]
        output = "\n".join(texts or [content for _, content in report.sections]).rstrip()
        lines += ["its output ends:", output[-OUTPUT:]]
    return "\n".join(lines)


def is_ours(path: Path) -> bool:
    """Return whether a file belongs to the checkout, not to a library in one of its environments."""
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] != ".quartet"


if __name__ == "__main__":
    sys.path[0] = ""  # as for `python -m pytest`, not this file's folder
    with open(sys.argv[1], "a") as events:
        sys.exit(pytest.main(sys.argv[2:], plugins=[Events(events)]))
