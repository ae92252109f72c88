"""Pytest as `python -m pytest` runs it, with each test's start and outcome written to a file as they happen.

    python tests/pytest_events.py EVENTS ARGUMENTS...

A line of EVENTS is a JSON object: `{"tests": N}`, how many were collected; `{"started": ID}`; `{"ended": ID, "outcome":
…, "seconds": …, "error": …, "output": …}` for each of a test's phases (set-up, call, tear-down), with a failure's
traceback and what the test had printed.
"""

import json
import sys
from typing import TextIO

import pytest


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
            self._write(ended=report.nodeid, outcome="uncollected", seconds=0.0, error=report.longreprtext, output="")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        error = output = ""
        if report.failed:
            error = report.longreprtext or report.outcome
            output = "\n".join(f"--- {title} ---\n{content}" for title, content in report.sections)
        event = {"ended": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        self._write(**event, error=error, output=output)


if __name__ == "__main__":
    sys.path[0] = ""  # as for `python -m pytest`, not this file's folder
    with open(sys.argv[1], "a") as events:
        sys.exit(pytest.main(sys.argv[2:], plugins=[Events(events)]))
