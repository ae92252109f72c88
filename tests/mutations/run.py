"""`make mutations`: checks that each mutation in tests/mutations is caught by the tests that it names.

    .quartet/envs/dev/bin/python tests/mutations/run.py [--lanes N] [--limit SECONDS] [SERVICE/NAME ...]

Names may be patterns (`'broker/*'`). Each lane is a clone of this checkout, including uncommitted changes, in
`.quartet/mutations`, with its own environments. There a patch is applied, its tests are run up to the first failure,
and the patch is reverted. At the end the failed tests are run without a patch, where they must pass. A mutation is

    caught   a test failed with it (even if its processes then hang) and passes without it, or a patch with `Hang: yes`
             reached the limit
    missed   no test failed within the limit
    broken   it does not apply, no test ran or could be collected, or the failed test fails without it too

A table is printed and written to `.quartet/results/mutations.json`; the exit status is 1 unless all are caught.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from patches import Mutation, read_mutations

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".quartet" / "results"
END_SECONDS = 30  # for a failed test, and for tests/run.py, to stop the processes they started
POLL_SECONDS = 0.5


@dataclass
class Verdict:
    """The result of a mutation."""

    mutation: str
    verdict: str  # caught, missed, broken
    by: str  # the test that caught it, or why none did
    seconds: float


class Lane:
    """A clone of the checkout that tries mutations one after the other."""

    def __init__(self, number: int, commit: str, limit: float) -> None:
        self._folder = ROOT / ".quartet" / "mutations" / str(number)
        self._results = self._folder / ".quartet" / "results"
        self._limit = limit
        if not (self._folder / ".git").exists():
            git(ROOT, "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(self._folder))
        git(self._folder, "reset", "--quiet", "--hard", commit)
        git(self._folder, "clean", "--quiet", "-fd")
        subprocess.run(
            [sys.executable, "deploy/local/environments.py", "--with-tests", "--quiet"], cwd=self._folder, check=True
        )

    def try_out(self, mutation: Mutation) -> Verdict:
        started = time.monotonic()
        verdict, by = self._judge(mutation)
        return Verdict(mutation.name, verdict, by, round(time.monotonic() - started, 1))

    def _judge(self, mutation: Mutation) -> tuple[str, str]:
        try:
            self._apply(mutation)
        except subprocess.CalledProcessError as error:
            return "broken", f"does not apply: {error.stderr.strip()}"
        try:
            ended = self._run_tests([*mutation.tests, "--", "-x"], self._limit)
        finally:
            self._apply(mutation, "--reverse")
        ran, failed, uncollected = self._events()
        if uncollected:
            return "broken", f"cannot be collected: {uncollected[0]}"
        if not failed and not ended:
            return ("caught" if mutation.hangs else "missed"), f"the tests ran longer than {self._limit:.0f} s"
        if not ran:
            return "broken", "no test ran"
        return ("caught", failed[0]) if failed else ("missed", f"{len(ran)} tests passed")

    def passing(self, tests: Sequence[str]) -> set[str]:
        """Return those of the tests that pass without a mutation."""
        self._run_tests(tests, max(self._limit, len(tests) * END_SECONDS))
        ran, failed, _ = self._events()
        return ran - {*failed}

    def _apply(self, mutation: Mutation, *options: str) -> None:
        git(self._folder, "apply", *options, str(mutation.path))
        for file in mutation.files:  # Python would reuse byte code after a change of the same size in the same second
            path = self._folder / file
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink()

    def _run_tests(self, words: Sequence[str], limit: float) -> bool:
        """Run tests; return whether they ended within the limit, with -x also within END_SECONDS of a failure."""
        for file in self._results.glob("*.events"):
            file.unlink()
        program = [sys.executable, "tests/run.py", "--at-a-time", "1", *words]
        process = subprocess.Popen(
            program, cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline, failed = time.monotonic() + limit, "-x" not in words
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if not failed and self._events()[1]:
                    failed, deadline = True, min(deadline, time.monotonic() + END_SECONDS)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
            return process.poll() is not None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.wait(END_SECONDS)

    def _events(self) -> tuple[set[str], list[str], list[str]]:
        """Return the tests that ran, those that failed, and the files that could not be collected."""
        lines = (line for file in self._results.glob("*.events") for line in file.read_text().splitlines(keepends=True))
        ended = [event for line in lines if line.endswith("\n") and "ended" in (event := json.loads(line))]
        by_outcome = {
            outcome: list(dict.fromkeys(event["ended"] for event in ended if event["outcome"] == outcome))
            for outcome in ("passed", "failed", "skipped", "uncollected")
        }
        ran = {*by_outcome["passed"], *by_outcome["failed"]} - {*by_outcome["skipped"]}
        return ran, by_outcome["failed"], by_outcome["uncollected"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Try the mutations of tests/mutations.")
    parser.add_argument("names", nargs="*", metavar="SERVICE/NAME", help="or a pattern; default: all")
    parser.add_argument("--lanes", type=int, default=2, help="clones in parallel (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a mutation's tests (default: %(default)s)")
    arguments = parser.parse_args()
    mutations = read_mutations(arguments.names)
    if not mutations:
        parser.error("no mutation has such a name")
    lanes = make_lanes(min(arguments.lanes, len(mutations)), arguments.limit)
    with ThreadPoolExecutor(lanes.qsize()) as pool:
        verdicts = list(pool.map(lambda mutation: on_a_lane(lanes, mutation), mutations))
        confirm(verdicts, [lanes.get() for _ in range(lanes.qsize())], pool)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "mutations.json").write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=2) + "\n")
    print()
    print("\n".join(f"{one.verdict:7} {one.seconds:6.1f} s  {one.mutation:45} {one.by}" for one in verdicts))
    caught = sum(verdict.verdict == "caught" for verdict in verdicts)
    print(f"\n{caught} of {len(verdicts)} caught")
    return 0 if caught == len(verdicts) else 1


def confirm(verdicts: list[Verdict], lanes: list[Lane], pool: ThreadPoolExecutor) -> None:
    """Mark as broken what was caught by a test that fails without the mutation too."""
    caught = [verdict for verdict in verdicts if verdict.verdict == "caught" and "::" in verdict.by]
    tests = list(dict.fromkeys(verdict.by for verdict in caught))
    shares = [tests[number :: len(lanes)] for number in range(len(lanes))]
    passing = set().union(*pool.map(lambda lane, share: lane.passing(share) if share else set(), lanes, shares))
    for verdict in caught:
        if verdict.by not in passing:
            verdict.verdict, verdict.by = "broken", f"fails without the mutation too: {verdict.by}"


def make_lanes(count: int, limit: float) -> queue.SimpleQueue[Lane]:
    commit = commit_of_work_tree()
    lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for number in range(count):
        print(f"lane {number}: making its environments", flush=True)
        lanes.put(Lane(number, commit, limit))
    return lanes


def commit_of_work_tree() -> str:
    """Create a commit, on no branch, of all files that git does not ignore; return its id."""
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git(ROOT, "add", "--all", variables=index)
        tree = git(ROOT, "write-tree", variables=index)
    person = ("-c", "user.name=mutations", "-c", "user.email=mutations@localhost")
    return git(ROOT, *person, "commit-tree", tree, "-p", "HEAD", "-m", "mutations")


def git(folder: Path, *arguments: str, variables: dict[str, str] | None = None) -> str:
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(["git", *arguments], cwd=folder, env=environment, check=True, text=True, capture_output=True)
    return done.stdout.strip()


def on_a_lane(lanes: queue.SimpleQueue[Lane], mutation: Mutation) -> Verdict:
    lane = lanes.get()
    try:
        verdict = lane.try_out(mutation)
    finally:
        lanes.put(lane)
    print(f"{verdict.verdict:7} {verdict.seconds:6.1f} s  {verdict.mutation}  {verdict.by}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
