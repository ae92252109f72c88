"""Attacks of all kinds on a running system, with a bystander that makes ordinary calls: the last part of `make fuzz`.

    .quartet/envs/dev/bin/python tests/attacks/run.py [--minutes 10] [--seed 1]

Four real services train a small model. The bystander's calls are timed before and during the attacks (attacks.py),
which come in random order. Requirements: each attack gets an allowed status code; the 99th percentile of the
bystander's calls is at most three times that before, and under a second; steps are trained in each minute; no process
grows by more than `MOST_GROWTH`; after the prompts are ended, the run ends with a clean audit. The tables are printed;
the exit status is 1 if a requirement is not met.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from attackers import THREADS
from attacks import ATTACKS

from quartet_client import AsyncClient, QuartetError
from quartet_common.errors import AWAY

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent / "upgrade"))
from live_run import RUN, SERVICES, LiveRun  # noqa: E402 (beside the other suite's tests)
from preloaded import Pythons, make_models, process_of  # noqa: E402

KINDS = (*SERVICES, "environment")
PART_SECONDS = 60.0  # in each such interval, or in all the time if that is shorter, steps must be trained
SECONDS = 300.0  # timeout of every wait
MOST_SLOWER, MOST_SECONDS = 3.0, 1.0
# A p99 that is always allowed: processes share two processors in slices of a few milliseconds, and the attackers are
# additional processes. On a machine with other load, a call may take as long as three wake-ups of a timer: of the
# bystander, of the service, and one between.
FLOOR_SECONDS = 0.02
WAKINGS = 3
# Of a service with its processes: two messages of the maximal size for each attacker, as bytes and parsed. The reward
# service's processes are counted separately, because a worker may use all of reward.worker_memory_bytes.
MOST_GROWTH = THREADS * 2 * (64 << 20)
WORKERS, MOST_WORKERS_GROWTH = "workers", 1 << 30
# Of Redis: the limits of prompts, events and members, for the run and for each attacker's own run, times two for
# Redis' overhead.
PROMPT_BYTES, EVENT_BYTES, MEMBER_BYTES = 32 << 20, 4 << 20, 1024 * 4096
MOST_REDIS_GROWTH = 2 * (THREADS + 1) * (PROMPT_BYTES + EVENT_BYTES + MEMBER_BYTES)


@dataclass
class Report:
    """The measurements.

    Attributes:
        codes: counts of status codes by attack.
        calls: seconds of the bystander's calls by kind, before and during the attacks.
        errors: counts of the bystander's calls that failed.
        steps: trained in each interval.
        memory: bytes of each service with its processes: before the attacks, and the maximum since.
        audit: the line of `quartet audit`; wrong: further faults, a sentence each.
    """

    codes: dict[str, dict[str, int]] = field(default_factory=dict)
    calls: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    audit: str = ""
    wrong: list[str] = field(default_factory=list)

    def judge(self, timed: bool) -> list[str]:
        """Return the requirements not met, a sentence each; `timed`: compare latencies with those before, too."""
        wrong = list(self.wrong)
        for attack in ATTACKS:
            came = self.codes.get(attack.name, {})
            if not came:
                wrong.append(f"{attack.name}: never came up")
            if foreign := came.keys() - attack.allowed:
                wrong.append(f"{attack.name}: answered {', '.join(sorted(foreign))}")
        wrong += [f"{count} calls of the bystander: {what}" for what, count in self.errors.items()]
        woken_late = WAKINGS * p99(self.calls["timer"][1])
        for kind, (before, during) in self.calls.items():
            most = max(MOST_SLOWER * p99(before), FLOOR_SECONDS, woken_late) if timed else MOST_SECONDS
            if p99(during) > min(most, MOST_SECONDS) and kind != "timer":
                wrong.append(f"{kind}: p99 {p99(during):.3f} s, {p99(before):.3f} s before")
        wrong += [f"no step in part {number}" for number, count in enumerate(self.steps) if not count]
        bounds = {"redis": MOST_REDIS_GROWTH, WORKERS: MOST_WORKERS_GROWTH}
        for name, (before, most) in self.memory.items():
            allowed = bounds.get(name, MOST_GROWTH)
            if most - before > allowed:
                wrong.append(f"{name} grew from {before >> 20} to {most >> 20} MiB; allowed: {allowed >> 20} more")
        if "0 lost, 0 twice, 0 stuck" not in self.audit:
            wrong.append(f"the audit: {self.audit}")
        return wrong

    def tables(self) -> str:
        """Return the measurements as text."""
        lines = [f"{'attack':62} answered"]
        for name, codes in self.codes.items():
            lines.append(f"{name:62} {', '.join(f'{count} {code}' for code, count in sorted(codes.items()))}")
        lines += ["", f"{'bystander':10} {'calls':>7} {'p50':>8} {'p99':>8} {'max':>8}   before: {'p50':>8} {'p99':>8}"]
        for kind, (before, during) in sorted(self.calls.items()):
            now = (statistics.median(during), p99(during), max(during))
            was = (statistics.median(before), p99(before))
            figures = [f"{1000 * seconds:6.1f}ms" for seconds in (*now, *was)]
            lines.append(f"{kind:10} {len(during):7} {' '.join(figures[:3])}           {' '.join(figures[3:])}")
        lines += ["", f"{'memory':10} {'before':>9} {'most':>9}"]
        lines += [f"{name:10} {was >> 20:6}MiB {most >> 20:6}MiB" for name, (was, most) in self.memory.items()]
        return "\n".join([*lines, "", f"steps in each part: {self.steps}", f"audit: {self.audit}"])


def p99(seconds: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


async def attack(folder: Path, seconds: float, quiet: float, seed: int) -> Report:
    """Run the attacks in a new folder; stop all processes at the end. Raises AssertionError if a service exits."""
    report = Report()
    settings = {
        "broker.max_prompt_bytes": PROMPT_BYTES,
        "broker.max_event_bytes": EVENT_BYTES,
        "run.prompt_lease_ttl": 5.0,
        "run.member_ttl": 5.0,
    }
    pythons = Pythons()
    make_models(pythons["trainer"], folder / "model")
    live = LiveRun(folder, folder / "model", pythons, settings=settings)
    calls, bystander = folder / "bystander.txt", None
    try:
        live.start_redis()
        for kind in KINDS:
            live.start(kind)
        live.attach()
        async with AsyncClient(**live.addresses, timeout=SECONDS) as client:
            await live.until("two steps are trained", lambda: _step(client, least=2))
            bystander = _python("bystander.py", calls, RUN, json.dumps(live.addresses))
            await live.until("each service has answered the bystander", lambda: _answered(calls))
            await asyncio.sleep(quiet)
            began = time.monotonic()
            report.memory = {name: (size, size) for name, size in _memory(live).items()}
            given = {"run_id": RUN, "addresses": live.addresses, "seconds": seconds, "seed": seed}
            attackers = _python("attackers.py", folder / "attackers.json", json.dumps(given))
            try:
                await _watch(live, client, report, attackers, seconds)
            finally:
                attackers.kill()
            bystander.kill()
            report.codes = json.loads((folder / "attackers.json").read_text())
            _read(calls, began, report)
            await client.end_prompts(RUN)
            status = await asyncio.to_thread(live.processes["client"].wait, SECONDS)
        audit = await asyncio.to_thread(live.audit)
        report.audit = next((line for line in audit.stdout.splitlines() if "exactly once" in line), audit.stderr)
        if status or audit.returncode:
            report.wrong.append(f"quartet run ended with {status}, quartet audit with {audit.returncode}")
    finally:
        if bystander is not None:
            bystander.kill()
        live.close()
        pythons.close()
    return report


async def _answered(calls: Path) -> bool:
    """Return whether the bystander has printed a call of each kind."""
    return {line.split()[1] for line in calls.read_text().splitlines() if line.count(" ") == 3} >= {*KINDS, "timer"}


async def _step(client: AsyncClient, least: int = 0) -> int:
    """Return the number of steps trained; 0 while there is no broker or no run, or fewer than `least`."""
    try:
        step = (await client.get_run(RUN)).policy_version
        return step if step >= least else 0
    except QuartetError as error:
        if error.code not in {*AWAY, grpc.StatusCode.NOT_FOUND}:
            raise
        return 0


async def _watch(
    live: LiveRun, client: AsyncClient, report: Report, attackers: subprocess.Popen, seconds: float
) -> None:
    """Count steps and sample memory until the attackers have finished."""
    step = await _step(client)
    ends = time.monotonic() + seconds
    part_ends = time.monotonic() + PART_SECONDS
    while attackers.poll() is None:
        live.must_run()
        assert time.monotonic() < ends + 2 * SECONDS, "the attackers do not come to an end"
        for name, size in _memory(live).items():
            before, most = report.memory[name]
            report.memory[name] = (before, max(most, size))
        if time.monotonic() > part_ends:
            now = await _step(client)
            report.steps.append(now - step)
            step, part_ends = now, part_ends + PART_SECONDS
        await asyncio.sleep(0.2)
    report.steps = report.steps or [await _step(client) - step]
    assert attackers.returncode == 0, f"the attackers ended with {attackers.returncode}"


def _memory(live: LiveRun) -> dict[str, int]:
    """Return the resident memory of each service with its processes, in bytes; the reward service's are `WORKERS`."""
    sizes: dict[str, int] = {}
    for name in ("redis", *KINDS):
        process = psutil.Process(process_of(live.processes[name].pid))
        own, below = _resident([process]), _resident(process.children(recursive=True))
        sizes |= {name: own, WORKERS: below} if name == "reward" else {name: own + below}
    return sizes


def _resident(processes: list[psutil.Process]) -> int:
    total = 0
    for one in processes:
        with suppress(psutil.NoSuchProcess):  # a worker that has just been replaced
            total += one.memory_info().rss
    return total


def _python(program: str, output: Path, *arguments: str) -> subprocess.Popen:
    with output.open("w") as file:
        return subprocess.Popen([sys.executable, str(HERE / program), *arguments], stdout=file)


def _read(calls: Path, began: float, report: Report) -> None:
    """Read the bystander's calls before and during the attacks into the report."""
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for line in calls.read_text().splitlines()[:-1]:  # the last one may be incomplete
        at, kind, seconds, code = line.split()
        during = float(at) > began
        found[kind][during].append(float(seconds))
        if code != "OK" and during:
            report.errors[f"{kind} {code}"] += 1
    report.calls = dict(found)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description="Attack a running system.")
    parser.add_argument("--minutes", type=float, default=10.0, help="of attacks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what is sent (default: %(default)s)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that processes are stopped, too
    folder = ROOT / ".quartet" / "attacks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seconds = 60 * arguments.minutes
    report = asyncio.run(attack(folder, seconds, min(60.0, seconds / 2), arguments.seed))
    wrong = report.judge(timed=True)
    print("\n".join([report.tables(), "", *(wrong or ["all requirements met"])]))
    print(f"logs: {os.path.relpath(folder)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
