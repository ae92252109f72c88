"""`make test`: every suite in its own environment, with a summary at the end.

    .quartet/envs/dev/bin/python tests/run.py [--list] [--quick] [--at-a-time N] [--repeat N] [--busy N]
                                              [SUITE | PATH[::NAME] ...] [-- PYTEST OPTIONS]

Up to three suites run in parallel, at most one more than there are cores because many often wait, the longest first.
`--quick` (`make check`): lint, types and the tests that start no engine, those of changed files first. `--repeat 20
--busy 2` (`make flakes`): run everything 20 times, beside 2 processes that use the CPU.

Other suites continue when one fails; a failing test is printed immediately. A suite that exceeds its time limit is
killed with its descendants and counts as failed. The results are printed as a table and written to `.quartet/results`:
`test.json`, `junit.xml`, and each suite's output in `SUITE.log`. Below the table are the failures with short errors, in
at most 3,000 characters, so that the end of a log has all of them. The last line is `N passed, M failed, K skipped`.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from progress import Progress
from suite_run import RESULTS, Result, SuiteRun, line_of
from suites import ROOT, SUITES, Suite, choose, quick

sys.path.append(str(ROOT / "tests" / "preloaded"))
from preloaded import Shared  # noqa: E402

SLOWEST = 10
ERROR_CHARACTERS = 2600  # at the end, for all failures and their names together
LEAST_CHARACTERS = 100  # of each error


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests of this checkout.")
    parser.add_argument("wanted", nargs="*", metavar="SUITE | PATH[::NAME]", help="default: all suites")
    parser.add_argument("--list", action="store_true", help="list the suites and stop")
    parser.add_argument("--quick", action="store_true", help="lint, types, and tests that start no engine")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run all N times")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="beside N processes that use the CPU")
    parallel = min(3, (os.cpu_count() or 1) + 1)
    parser.add_argument("--at-a-time", type=int, default=parallel, help="suites in parallel (default: %(default)s)")
    ours, options = split(sys.argv[1:])
    arguments = parser.parse_args(ours)
    if arguments.list:
        print(
            "\n".join(f"{suite.name:12} {suite.folder or ', '.join(map(' '.join, suite.commands))}" for suite in SUITES)
        )
        return 0
    try:
        suites = choose(arguments.wanted)
        # The longest first; quick suites take seconds: those of changed files first.
        suites = quick(suites) if arguments.quick else sorted(suites, key=lambda suite: -suite.limit)
    except ValueError as error:
        parser.error(str(error))
    RESULTS.mkdir(parents=True, exist_ok=True)
    # A shell without job control starts background jobs with SIGINT ignored, which children inherit: tests of Ctrl-C
    # would time out.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    with Progress() as progress, busy(arguments.busy), contextlib.closing(Shared()):
        runs = [run_suites(suites, arguments.at_a_time, options, progress) for _ in range(arguments.repeat)]
    return summarize([added_up(results) for results in zip(*runs, strict=True)], time.monotonic() - began)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy, at most as long as this process lives."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    loops = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return this program's arguments and pytest's, which follow `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def run_suites(suites: list[Suite], at_a_time: int, options: list[str], progress: Progress) -> list[Result]:
    """Run suites in this order, `at_a_time` in parallel."""
    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            return list(pool.map(lambda suite: SuiteRun(suite, options, progress).run(), suites))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def added_up(results: tuple[Result, ...]) -> Result:
    """Return the sum of all runs of a suite."""
    total = Result(results[0].suite)
    for result in results:
        for key in ("passed", "failed", "skipped", "seconds", "cpu_seconds"):
            setattr(total, key, getattr(total, key) + getattr(result, key))
        total.reason = total.reason or result.reason
        total.durations |= result.durations
        total.failures |= result.failures
    return total


def summarize(results: list[Result], seconds: float) -> int:
    """Print the slowest tests, the table and the last line; write JSON and JUnit's XML; return the exit status."""
    durations = sorted(((spent, test) for result in results for test, spent in result.durations.items()), reverse=True)
    if durations:
        print("\nslowest tests:")
        print("\n".join(f"{spent:8.1f} s  {test}" for spent, test in durations[:SLOWEST]))
    passed, failed, skipped = (
        sum(getattr(result, key) for result in results) for key in ("passed", "failed", "skipped")
    )
    print(f"\n{'':7} {'suite':12} {'passed':>5} {'failed':>6} {'skipped':>8} {'seconds':>8} {'CPU s':>8}")
    for result in results:
        print(line_of(result))
    summary = {
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(seconds, 1),
        "suites": [asdict(result) for result in results],
    }
    (RESULTS / "test.json").write_text(json.dumps(summary, indent=2) + "\n")
    merge_reports(results)
    cpu = sum(result.cpu_seconds for result in results)
    where = RESULTS.relative_to(ROOT)
    print("\n".join(errors_of(results)))
    print(f"\n{seconds:.0f} s in all, {cpu:.0f} s of CPU; logs, test.json and junit.xml are in {where}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


def errors_of(results: list[Result]) -> list[str]:
    """Return the failures with their errors, shortened so that the end of a log has all names."""
    failures = [(f"FAILED {each.suite}: {name}", text) for each in results for name, text in each.failures.items()]
    left = ERROR_CHARACTERS - sum(len(name) for name, _ in failures)
    share = max(LEAST_CHARACTERS, left // max(1, len(failures)))
    return [f"\n{name}\n{shortened(text.strip(), share)}" for name, text in failures]


def shortened(text: str, most: int) -> str:
    """Return the beginning and the end of a text: a command's output ends with the reason."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … {text[-(most // 2) :]}"


def merge_reports(results: list[Result]) -> None:
    """Write one JUnit report of all suites."""
    merged = ElementTree.Element("testsuites")
    for result in results:
        report = RESULTS / f"{result.suite}.xml"
        for suite in ElementTree.parse(report).getroot().iter("testsuite") if report.exists() else ():
            suite.set("name", result.suite)
            merged.append(suite)
    ElementTree.ElementTree(merged).write(RESULTS / "junit.xml", encoding="utf-8", xml_declaration=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
