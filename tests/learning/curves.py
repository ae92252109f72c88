"""Learning curves of every algorithm, from one warm-up: `.quartet/envs/client/bin/python tests/learning/curves.py`.

Each is a run of the four services on this machine (docs/learning.md). Results of finished runs are stored, so the
program can be stopped at any time and continues later; `--again NAME` repeats a case. Exit status 0 only if all runs
exist and meet their requirements.
"""

import argparse
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import curve_report
import curve_runs
from curve_cases import CASES, Case, schedule

FOLDER = curve_runs.ROOT / ".quartet" / "learning"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {'; '.join(names)}. Default: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs and results are kept")
    parser.add_argument("--minutes", type=float, default=120, help="no run begins after this time")
    parser.add_argument("--again", action="store_true", help="repeat runs that are there")
    parser.add_argument("--report", action="store_true", help="run nothing; write what is there")
    parser.add_argument("--write", action="store_true", help="write the pictures and benchmarks/RESULTS.md too")
    arguments = parser.parse_args()
    for name in arguments.cases:
        if name not in names:
            parser.error(f"no case is called '{name}'; there are {', '.join(names)}")
    arguments.folder = arguments.folder.resolve()
    os.chdir(curve_runs.ROOT)  # the run file's paths are relative to it
    with closing(curve_runs.Pythons()) as pythons:
        curve_runs.prepare(pythons)
    chosen = tuple(case for case in CASES if not arguments.cases or case.name in arguments.cases)
    failed = 0 if arguments.report else do(chosen, arguments)
    results = [(case, curve_runs.kept(arguments.folder, case, seed)) for case in CASES for seed in case.seeds]
    there = [(case, result) for case, result in results if result is not None]
    curve_report.save(arguments.folder / "results.json", there)
    if arguments.write and there:
        curve_report.write(there)
    missing = len(results) - len(there)
    broken = [
        f"{case.name}, seed {result.seed}"
        for case, result in there
        if not case.holds(result.lift, result.lift_of_teacher)
    ]
    compared = curve_report.compared(there)
    broken += [f"{one.case}, seed {one.seed}" for one in compared if not one.holds]
    for one in compared:
        print(one.line)
    print(f"{len(there)} of {len(results)} runs are there; bars broken: {'; '.join(broken) or 'none'}")
    return 1 if failed or missing or broken else 0


def do(cases: tuple[Case, ...], arguments: argparse.Namespace) -> int:
    """Execute the missing runs; return the number that failed."""
    deadline = time.monotonic() + 60 * arguments.minutes
    failed = 0
    with closing(curve_runs.Pythons()) as pythons:
        for case, seed in schedule(cases):
            result = None if arguments.again else curve_runs.kept(arguments.folder, case, seed)
            if result is None:
                if time.monotonic() > deadline:
                    print(f"{arguments.minutes:g} minutes are over: the rest is left for the next call", flush=True)
                    break
                try:
                    result = curve_runs.do(arguments.folder, pythons, case, seed)
                except curve_runs.RunFailed as failure:
                    print(f"{case.name}, seed {seed} FAILED: {failure}", flush=True)
                    failed += 1
                    continue
            print(curve_report.line(case, result), flush=True)
    return failed


def interrupt(*_) -> None:
    """Stop child processes on SIGTERM, as on Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
