"""`make test`: every suite in its own environment, with a summary at the end.

    .quartet/envs/dev/bin/python tests/run.py [--list] [--at-a-time N] [SUITE ...]

One after the other, or with `--at-a-time 2` side by side, longest first, as most of a suite's time is one process that
starts or waits; those that watch clocks and memory closely, or keep all cores busy themselves, then come last, alone.

A failing suite does not keep the others from running. Each has a time limit, after which it and whatever it started is
killed, and it counts as failed. What was counted is printed as a table, written to `.quartet/results/test.json`, and
summed up in the last line: `N passed, M failed, K skipped`. Each suite's output is in `.quartet/results/SUITE.log`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".quartet" / "results"
GUARD = ROOT / "deploy" / "local" / "quartet_local" / "guard.py"
RELEASED = ROOT / "protos" / "released"
TAIL_LINES = 80
GRACE_SECONDS = 5


@dataclass(frozen=True)
class Suite:
    """Commands that pass or fail together (`commands`), or the tests of a folder (`folder`)."""

    name: str
    environment: str
    limit: float  # seconds
    folder: str = ""
    commands: tuple[tuple[str, ...], ...] = ()
    alone: bool = False

    @property
    def exists(self) -> bool:
        return not self.folder or (ROOT / self.folder).is_dir()


@dataclass
class Result:
    """What became of a suite."""

    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    reason: str = ""  # why it failed, beyond failing tests


def buf_breaking() -> tuple[tuple[str, ...], ...]:
    """One comparison with each released descriptor image."""
    images = sorted(RELEASED.glob("*.binpb"))
    return tuple(("buf", "breaking", "protos", "--against", str(image.relative_to(ROOT))) for image in images)


# Packages without torch, whose every dependency is in the development environment.
TYPED = (
    "services/common/quartet_common",
    "services/broker/quartet_broker",
    "services/reward/quartet_reward",
    "client/quartet_client",
    "deploy/local/quartet_local",
)

SUITES = (
    Suite(
        "lint",
        "dev",
        240,
        commands=(("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy", *TYPED)),
    ),
    Suite("protos", "dev", 60, commands=(("buf", "lint", "protos"), *buf_breaking())),
    Suite("common", "dev", 300, "services/common/tests"),
    Suite("broker", "broker", 700, "services/broker/tests"),
    Suite("reward", "reward", 400, "services/reward/tests"),
    Suite("reward-model", "reward-model", 300, "services/reward/tests_reward_model"),
    Suite("rollout", "rollout", 900, "services/rollout/tests"),
    Suite("trainer", "trainer", 900, "services/trainer/tests"),
    Suite("client", "client", 300, "client/tests"),
    Suite("launcher", "dev", 900, "deploy/local/tests", alone=True),
    Suite("deploy", "dev", 500, "tests/deploy"),
    Suite("docs", "dev", 500, "tests/docs"),
    Suite("contract", "dev", 700, "tests/contract", alone=True),
    Suite("integration", "dev", 900, "tests/integration", alone=True),
    Suite("hostile", "reward", 400, "tests/hostile", alone=True),
    Suite("chaos", "dev", 400, "tests/chaos", alone=True),
    Suite("resume", "dev", 400, "tests/resume", alone=True),
    Suite("upgrade", "dev", 600, "tests/upgrade", alone=True),
    Suite("hosts", "dev", 600, "tests/hosts", alone=True),
    Suite("learning", "dev", 600, "tests/learning", alone=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests of this checkout.")
    known = [suite.name for suite in SUITES]
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--list", action="store_true", help="list the suites and stop")
    parser.add_argument("--at-a-time", type=int, default=1, help="suites side by side (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.list:
        print(
            "\n".join(f"{suite.name:12} {suite.folder or ', '.join(map(' '.join, suite.commands))}" for suite in SUITES)
        )
        return 0
    for name in arguments.suites:
        if name not in known:
            parser.error(f"no suite is called '{name}'; there are {', '.join(known)}")
    chosen = [suite for suite in SUITES if suite.exists and (not arguments.suites or suite.name in arguments.suites)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    # A shell without job control has what it starts in the background ignore Ctrl-C, and so would every child: tests of
    # Ctrl-C would wait in vain.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    together = [suite for suite in chosen if not suite.alone]
    if arguments.at_a_time > 1:
        together.sort(key=lambda suite: -suite.limit)
    results = run_suites(together, arguments.at_a_time)
    results |= run_suites([suite for suite in chosen if suite.alone], 1)
    return summarise([results[suite.name] for suite in chosen], time.monotonic() - began)


def run_suites(suites: list[Suite], at_a_time: int) -> dict[str, Result]:
    """Run suites in this order, so many at a time, and say what came of each when it ends."""
    results = {}
    with ThreadPoolExecutor(at_a_time) as pool:
        for done in as_completed([pool.submit(run_suite, suite) for suite in suites]):
            result = results[done.result().suite] = done.result()
            print(line_of(result), flush=True)
            if result.failed:
                print_tail(result.suite)
    return results


def run_suite(suite: Suite) -> Result:
    """Run a suite and count what came of it."""
    started = time.monotonic()
    deadline = started + suite.limit
    result = Result(suite.name)
    log = RESULTS / f"{suite.name}.log"
    report = RESULTS / f"{suite.name}.xml"
    report.unlink(missing_ok=True)
    log.write_text("")
    for command in suite.commands or (pytest_command(suite, report),):
        status = run_command(suite.environment, command, log, deadline - time.monotonic())
        if suite.commands:
            result.passed, result.failed = result.passed + (status == 0), result.failed + (status != 0)
        if status is None:
            result.reason = f"killed after its {suite.limit:.0f} s"
    if suite.folder:
        count(report, result)
        if (status is None or status not in (0, 5)) and not result.failed:  # 5: it has no tests
            result.failed = 1
            result.reason = result.reason or f"pytest ended with status {status}"
    result.seconds = round(time.monotonic() - started, 1)
    return result


def pytest_command(suite: Suite, report: Path) -> tuple[str, ...]:
    options = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), f"--junitxml={report}", "-ra")
    return ("python", "-m", "pytest", suite.folder, *options)


def run_command(environment: str, command: tuple[str, ...], log: Path, limit: float) -> int | None:
    """Run a program of an environment, its output appended to the log. Return its status, None if it took too long."""
    folder = ROOT / ".quartet" / "envs" / environment / "bin"
    variables = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    variables.pop("PYTHONPATH", None)
    # Where nothing is compiled ahead, each of the hundreds of services that the tests start would compile its imports.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    # buf keeps a cache, pytest plug-ins look for a home: there is none in some build machines.
    variables.setdefault("HOME", str(ROOT / ".quartet" / "cache"))
    guarded = [sys.executable, "-I", "-S", str(GUARD), str(GRACE_SECONDS), str(folder / command[0]), *command[1:]]
    with log.open("a") as output:
        print(f"$ {' '.join(command)}", file=output, flush=True)
        process = subprocess.Popen(
            guarded, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            return process.wait(timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            print(f"\nkilled: the suite's time limit of {limit:.0f} s is over", file=output, flush=True)
            return None
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """The guard ends what it guards: gently at the first signal, at once at the second."""
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=GRACE_SECONDS + 5)
            except subprocess.TimeoutExpired:
                continue


def count(report: Path, result: Result) -> None:
    """Add up pytest's own report."""
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
    counts = f"{result.passed:5} {result.failed:7} {result.skipped:8} {result.seconds:8.1f}"
    return f"{verdict:7} {result.suite:12} {counts}  {result.reason}".rstrip()


def print_tail(name: str) -> None:
    lines = (RESULTS / f"{name}.log").read_text(errors="replace").splitlines()
    print("\n".join(f"    {line}" for line in lines[-TAIL_LINES:]), flush=True)


def summarise(results: list[Result], seconds: float) -> int:
    """Print the table and the last line, write the JSON, return the exit status."""
    passed, failed, skipped = (
        sum(getattr(result, key) for result in results) for key in ("passed", "failed", "skipped")
    )
    print(f"\n{'':7} {'suite':12} {'passed':>5} {'failed':>6} {'skipped':>8} {'seconds':>8}")
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
    print(f"\n{seconds:.0f} s in all; logs and test.json are in {RESULTS.relative_to(ROOT)}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
