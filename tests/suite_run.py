"""Runs one suite under the guard, follows its events, and counts the results."""

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from progress import Progress, Running
from suites import ROOT, Suite

from quartet_local import guard

sys.path.append(str(ROOT / "tests" / "preloaded"))
from server import ACCOUNT  # noqa: E402

RESULTS = ROOT / ".quartet" / "results"
TAIL_LINES = 40
GRACE_SECONDS = 5
POLL_SECONDS = 0.1


@dataclass
class Result:
    """The result of a suite."""

    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # user and system, including all processes that it started or had forked
    reason: str = ""  # why it failed, apart from failing tests
    durations: dict[str, float] = field(default_factory=dict)  # seconds by test
    failures: dict[str, str] = field(default_factory=dict)  # shortened errors by test or command


class SuiteRun:
    """One execution of a suite."""

    def __init__(self, suite: Suite, options: list[str], progress: Progress) -> None:
        self._suite = suite
        self._options = options
        self._progress = progress
        self._log, self._report, self._events, self._account = (
            RESULTS / f"{suite.name}.{suffix}" for suffix in ("log", "xml", "events", "cpu")
        )
        self._result = Result(suite.name)
        self._durations: Counter[str] = Counter()

    def run(self) -> Result:
        started = time.monotonic()
        for file in (self._report, self._events):
            file.unlink(missing_ok=True)
        self._log.write_text("")
        self._events.touch()
        self._account.write_text("")
        running = self._progress.start(self._suite.name)
        try:
            self._run_commands(running, started + self._suite.limit)
        finally:
            self._progress.end(running)
        self._result.seconds = round(time.monotonic() - started, 1)
        self._result.cpu_seconds += sum(map(float, self._account.read_text().split()))
        self._result.cpu_seconds = round(self._result.cpu_seconds, 1)
        self._result.durations = dict(self._durations)
        self._progress.say(line_of(self._result))
        if self._result.reason or (self._suite.commands and self._result.failed):
            lines = self._log.read_text(errors="replace").splitlines()
            self._progress.say("\n".join([f"{self._log}:", *lines[-TAIL_LINES:]]))
            if self._result.reason:
                self._result.failures[self._result.reason] = "\n".join(lines[-TAIL_LINES:])
        return self._result

    def _run_commands(self, running: Running, deadline: float) -> None:
        result, suite = self._result, self._suite
        for command in suite.commands or (self._pytest(),):
            begin = self._log.stat().st_size
            status = self._run_command(command, running, deadline)
            if suite.commands and status:
                result.failures[" ".join(command)] = self._log.read_bytes()[begin:].decode(errors="replace")
            if status is None:
                result.reason = f"killed after its {suite.limit:.0f} s, in {running.test or command[0]}"
            if suite.commands:
                result.passed, result.failed = result.passed + (status == 0), result.failed + (status != 0)
        if suite.folder:
            count(self._report, result)
            if (status is None or status not in (0, 5)) and not result.failed:  # 5: no tests were collected
                result.failed = 1
                result.reason = result.reason or f"pytest ended with status {status}, in {running.test}"

    def _pytest(self) -> tuple[str, ...]:
        options = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), f"--junitxml={self._report}", "-ra")
        tests = self._suite.tests or (self._suite.folder,)
        return ("python", "tests/pytest_events.py", str(self._events), *tests, *options, *self._options)

    def _run_command(self, command: tuple[str, ...], running: Running, deadline: float) -> int | None:
        """Run a program of the environment with output to the log. Return its status, None after the deadline."""
        folder = ROOT / ".quartet" / "envs" / self._suite.environment / "bin"
        guarded = guard.guarded([str(folder / command[0]), *command[1:]], GRACE_SECONDS)
        environment = {**variables(folder), ACCOUNT: str(self._account)}
        with self._log.open("a") as output, self._events.open() as events:
            print(f"$ {' '.join(command)}", file=output, flush=True)
            process = subprocess.Popen(
                guarded, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                while (status := self._wait(process)) is None and time.monotonic() < deadline:
                    self._follow(events, running)
                self._follow(events, running)
                return status
            finally:
                self._end(process)

    def _wait(self, process: subprocess.Popen) -> int | None:
        """Wait briefly. Return the status of a process that has exited, and add up its and its children's CPU time."""
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not pid:
            time.sleep(POLL_SECONDS)
            return None
        self._result.cpu_seconds += usage.ru_utime + usage.ru_stime
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode

    def _end(self, process: subprocess.Popen) -> None:
        """Send SIGTERM twice: the guard forwards the first, and kills everything at the second."""
        for _ in range(2):
            if process.returncode is None:
                process.terminate()
                deadline = time.monotonic() + GRACE_SECONDS + 5
                while self._wait(process) is None and time.monotonic() < deadline:
                    pass

    def _follow(self, events: TextIO, running: Running) -> None:
        """Read new events; print failures."""
        while True:
            place = events.tell()
            line = events.readline()
            if not line.endswith("\n"):  # partly written: read again later
                events.seek(place)
                return
            event = json.loads(line)
            running.tests += event.get("tests", 0)
            if "started" in event:
                running.test, running.ended = event["started"], running.ended + bool(running.test)
            if "ended" in event:
                self._durations[event["ended"]] += event["seconds"]
                if event["error"]:
                    self._result.failures[event["ended"]] = event["brief"]
                    said = f"FAILED {event['ended']}\n{event['error']}\n{event['output']}"
                    self._progress.say(f"{self._suite.name}: {said}\n")


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables of a suite."""
    result = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    result.pop("PYTHONPATH", None)
    # Without byte code files each of the hundreds of services that the tests start would compile its imports.
    result.pop("PYTHONDONTWRITEBYTECODE", None)
    # buf and pytest plugins need a home folder, which some build machines lack.
    result.setdefault("HOME", str(ROOT / ".quartet" / "cache"))
    return result


def count(report: Path, result: Result) -> None:
    """Add the counts of pytest's report to the result."""
    if not report.exists():
        return
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        result.failed += failed
        result.skipped += skipped
        result.passed += max(0, total - failed - skipped)


def line_of(result: Result) -> str:
    verdict = "FAILED" if result.failed else "ok"
    counts = f"{result.passed:5} {result.failed:7} {result.skipped:8} {result.seconds:8.1f} {result.cpu_seconds:8.1f}"
    return f"{verdict:7} {result.suite:12} {counts}  {result.reason}".rstrip()
