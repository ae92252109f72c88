"""`make chaos`: kill every process, lose no group.

    .quartet/envs/dev/bin/python tests/chaos/run.py [--seed 7] [--groups 300] [--faults 20] [--restores]
    .quartet/envs/dev/bin/python tests/chaos/run.py --signals [--seed 7] [--faults 40] [--seeds 3]
    .quartet/envs/dev/bin/python tests/chaos/run.py --hangs [--seed 7] [--seeds 3]
    .quartet/envs/dev/bin/python tests/chaos/run.py --agents [--seed 7] [--faults 20] [--seeds 3]

The first form kills and stops processes; the next two, half as long each, restore Redis from older snapshots, and cut
the network between processes. `--processes`, `--restores` and `--network` select one form. Each prints a line per
fault, a table, and the result of `quartet audit`. Results go to `.quartet/results/chaos.json`, logs to
`.quartet/chaos`. `--signals`, `--hangs` and `--agents` are separate forms: a whole `quartet run` under signals, whose
processes are stopped for good, or of agents that fail, under signals, once for each seed.
Exit status: 0 if each group was trained exactly once in each form that ran, else 1.
"""

import argparse
import asyncio
import functools
import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import agents
import chaos
import hangs
import lan
import network
import signals
from deployment import Plan
from preloaded import SHARED, Pythons
from schedule import NETWORK_DECK, PROCESS_DECK, RESTORE_DECK, draw

from quartet_local import guard

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".quartet" / "results" / "chaos.json"
INSIDE = "QUARTET_CHAOS_INSIDE"
FORMS = {"processes": PROCESS_DECK, "restores": RESTORE_DECK, "network": NETWORK_DECK}
SIGNALS_SENT = {"signals": 40, "agents": 20}
WHOLE_RUNS = ("signals", "hangs", "agents")


def main() -> int:
    arguments = _arguments()
    if os.environ.get(INSIDE) == "1":
        return _run("network", arguments)
    if arguments.form in WHOLE_RUNS:
        return _whole_runs(arguments)
    results: dict[str, Any] = {}
    for form in [arguments.form] if arguments.form else FORMS:
        share = 1 if arguments.form or form == "processes" else 2
        if form == "network":
            size = {"groups": arguments.groups // share, "faults": arguments.faults // share}
            results[form] = network_form(arguments.folder, **size, seed=arguments.seed, limit=arguments.limit)
        else:
            _run(form, arguments, share)
            results[form] = _report(arguments.folder / form)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print()
    for form, result in results.items():
        print(f"{form:10} {result['line']}")
    print(f"results: {os.path.relpath(RESULTS)}")
    return 0 if all(result.get("right", True) for result in results.values()) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill every process, lose no group.")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule; same seed, same faults (default: 1)")
    parser.add_argument("--groups", type=int, default=5000, help="prompt groups to be trained (default: 5000)")
    parser.add_argument("--faults", type=int, help="number of faults (default: 200; --signals 40, --agents 20)")
    parser.add_argument("--limit", type=float, default=1200, help="seconds that a form may take (default: 1200)")
    parser.add_argument("--folder", type=Path, default=ROOT / ".quartet" / "chaos", help="for data and logs")
    only = parser.add_mutually_exclusive_group()
    parser.add_argument("--seeds", type=int, default=3, help="runs of --signals, --hangs, --agents (default: 3)")
    for form in (*FORMS, *WHOLE_RUNS):
        only.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=f"only the {form} form")
    arguments = parser.parse_args()
    arguments.faults = arguments.faults or SIGNALS_SENT.get(arguments.form, 200)
    if arguments.form not in WHOLE_RUNS and arguments.groups < 10 * arguments.faults:
        # At least ten groups for each fault, so that the system commits a step between faults.
        parser.error(f"--faults: got {arguments.faults}; allowed: a tenth of --groups, {arguments.groups // 10}")
    return arguments


def _whole_runs(arguments: argparse.Namespace) -> int:
    """Execute a `quartet run` of the form for each seed; return the exit status."""
    lines, right = [], True
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        folder = arguments.folder / f"{arguments.form}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        print(f"\nquartet run, {arguments.form}, seed {seed}; in {os.path.relpath(folder)}\n", flush=True)
        say = functools.partial(print, flush=True)
        report: signals.Report | hangs.Report
        with closing(Pythons()) as pythons:
            if arguments.form == "hangs":
                report = asyncio.run(hangs.run(folder, seed, list(hangs.TARGETS), pythons, say))
            else:
                form = signals if arguments.form == "signals" else agents
                report = asyncio.run(form.run(folder, seed, arguments.faults, pythons, say))
        if not report.right:
            print(f"\n{signals.explain(report, folder)}\n")
        right = right and report.right
        lines.append(report.line())
    print("", *lines, sep="\n")
    return 0 if right else 1


def network_form(folder: Path, groups: int, faults: int, seed: int, limit: float) -> dict[str, Any]:
    """Run this program in new namespaces; return its report."""
    if reason := lan.why_not():
        return {"impossible": reason, "line": f"not possible here: {reason}"}
    given = {"groups": groups, "faults": faults, "seed": seed, "limit": limit, "folder": folder}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = lan.within([sys.executable, __file__, "--network", *words])
    shutil.rmtree(folder / "network", ignore_errors=True)
    # Its process ids differ from ours, so it cannot use preloaded interpreters of this process.
    environment = {**os.environ, INSIDE: "1", SHARED: ""}
    subprocess.run(guard.guarded(command, 10), stdin=subprocess.DEVNULL, env=environment, check=False)
    return _report(folder / "network")


def _report(folder: Path) -> dict[str, Any]:
    path = folder / "report.json"
    if not path.exists():
        return {"right": False, "line": "it ended without a report; see its output above"}
    return json.loads(path.read_text())


def _run(form: str, arguments: argparse.Namespace, share: int = 1) -> int:
    folder = arguments.folder / form
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    groups, faults = arguments.groups // share, arguments.faults // share
    schedule = draw(arguments.seed, groups, faults, FORMS[form])
    where = os.path.relpath(folder / "logs")
    print(f"\n{form}: {groups} groups, {faults} faults, seed {arguments.seed}; logs: {where}\n", flush=True)
    place = network.Hosts() if form == "network" else network.Loopback()
    say = functools.partial(print, flush=True)
    plan, seed, limit = Plan(folder, groups), arguments.seed, arguments.limit
    with closing(Pythons()) as pythons:
        report = asyncio.run(chaos.run(plan, place, pythons, schedule, seed, limit, say))
    report.save()
    print(f"\n{_table(report) if report.right else report.explained()}\n")
    print(report.line(), flush=True)
    return 0 if report.right else 1


def _table(report: chaos.Report) -> str:
    stats, events = report.verdict.stats, report.events
    rows = [
        *sorted(report.faults.items(), key=lambda row: -row[1]),
        ("faults in all", report.done),
        ("", ""),
        ("starts of processes after the first", sum(report.starts.values()) - len(report.starts)),
        ("prompts delivered again", stats["redelivered"]),
        ("groups put twice and refused", stats["duplicates"]),
        ("groups put under a lost lease and refused", events.get("put lease_lost", 0)),
        ("groups too old, generated again", stats["stale"]),
        ("sessions of the trainer", events.get("leading", 0)),
        ("sessions fenced", events.get("fenced", 0)),
        ("wall time, s", f"{report.seconds:.0f}"),
    ]
    return "\n".join(f"{name:48} {number:>7}".rstrip() for name, number in rows)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
