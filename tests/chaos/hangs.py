"""The hangs form of `make chaos`: one `quartet run` with two rollouts, some of whose processes are stopped for good.

SIGSTOP hits an engine's process, a reward worker's process and a trainer's rank, not the services, whose event loops go
on. Each must be ended by its service within its deadline, and the run must go on; meanwhile the rollouts that were not
hit keep their rate. The seed determines the order, which of several processes is stopped, and when.

A rollout's rate is that of its groups which the broker accepted, by the rollout's own metrics: for `seconds` before the
signal, and from the signal until the process has ended, `seconds` at least. Other work on the machine changes with
time: a rollout whose threads, when they were ready, got a smaller part of that time on a processor than before (by the
kernel's schedstat) is expected to be as much slower. Such counts vary by chance: beyond 20%, what is missing may be
twice the square root of the count that was due.
"""

import asyncio
import math
import random
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from signals import END_SECONDS, READY_SECONDS, steps_of, until_there

from launched import Launched, preloaded_checkout, process_of  # isort: skip (its path is added by `signals`)
from preloaded import Pythons, make_models  # isort: skip
from started import write_demo_run  # isort: skip

from quartet_client import AsyncClient

KEPT = 0.8
GRACE_SECONDS = 20.0  # from a deadline to the end of the process: a service gives back what it holds
RUN = "hangs"
METRICS_OFFSET = 100
FUNCTION = "def score(completion, **columns):\n    return float(len(completion) % 2)\n"
_ACCEPTED = re.compile(r'^quartet_rollout_groups_total\{outcome="accepted"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """What is stopped: part of a command line, and how long it may take until it is ended."""

    command: str
    deadline_seconds: float


TARGETS = {
    "engine": Target(" transformers ", 6.0),
    "reward worker": Target("-m quartet_reward.workers.function", 3.0),
    "trainer rank": Target("-m quartet_trainer ", 12.0),
}


@dataclass
class Hang:
    """What was measured of one stopped process: seconds until it ended, and what the other rollouts made."""

    target: str
    deadline: float
    ended_after: float = math.inf
    rates: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Groups/s before and during the hang, and those due then, by the address of the rollout."""
    slow: list[str] = field(default_factory=list)
    stepped_after: float = math.inf
    """Seconds from the signal to the next step that was trained."""

    @property
    def right(self) -> bool:
        return self.ended_after <= self.deadline + GRACE_SECONDS and not self.slow and bool(self.rates)

    def line(self) -> str:
        rates = ", ".join(
            f"{before:.1f} → {during:.1f}/s ({due:.1f} due)" for before, during, due in self.rates.values()
        )
        return (
            f"{self.target}: ended after {self.ended_after:.1f} s (deadline {self.deadline:g}), a step after "
            f"{self.stepped_after:.1f} s, the others {rates}{' TOO SLOW' if self.slow else ''}"
        )


@dataclass
class Report:
    """The result of a run with hangs; `right` if it has no fault."""

    seed: int
    hangs: list[Hang] = field(default_factory=list)
    audit: str = ""
    failure: str = ""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return not self.failure and all(hang.right for hang in self.hangs)

    def line(self) -> str:
        what = self.failure.partition("\n")[0] or self.audit
        return "\n  ".join([f"seed {self.seed}: {what} ({self.seconds:.0f} s)", *(hang.line() for hang in self.hangs)])


async def run(
    folder: Path, seed: int, targets: Sequence[str], pythons: Pythons, say: Callable[[str], None], seconds: float = 10.0
) -> Report:
    """Execute a run in a new folder, with preloaded services, and stop a process of each target.

    `seconds`: how long a rate is measured.
    """
    report, began = Report(seed), time.monotonic()
    folder.mkdir(parents=True)
    make_models(pythons["trainer"], folder / "model")
    function = folder / "function.py"
    function.write_text(FUNCTION)
    limits = {name: target.deadline_seconds for name, target in TARGETS.items()}
    sections: dict[str, dict[str, object]] = {
        # What is trained is far ahead of what is generated, and the admission limit far away: each member has its own
        # rate, also while the trainer stands still.
        "run": {"groups_per_step": 16, "max_staleness": 40, "max_queued_prompts": 48},
        "run.sampling": {"max_new_tokens": 48},
        "data": {"passes": 100_000},
        "rollout": {"stall_seconds": limits["engine"], "max_running_completions": 4},
        "reward": {
            "functions": [f"{function}:score"],
            "function_workers": 2,
            "function_seconds": limits["reward worker"],
        },
        "trainer": {"ranks": 1 + ("trainer rank" in targets), "stall_seconds": limits["trainer rank"]},
        "trainer.checkpoint": {"interval": 5},
        "launcher": {"rollouts": 2},
    }
    run_file = write_demo_run(folder, RUN, **sections)
    verifiers = f'run.verifiers=[{{name="{function}:score"}}]'
    checkout = preloaded_checkout(folder / "checkout", pythons)
    launched = Launched([str(run_file), "--set", verifiers], folder / "output.txt", checkout=checkout)
    chance = random.Random(f"hangs/{seed}")
    try:
        async with AsyncClient.from_config(run_file, timeout=60) as client:
            for name in chance.sample(list(targets), len(targets)):
                await _until_all_work(launched, client)
                await asyncio.sleep(chance.uniform(0, 1))
                report.hangs.append(await _stop(launched, client, name, chance, seconds))
                say(report.hangs[-1].line())
            await client.end_prompts(RUN)
        status = await asyncio.to_thread(launched.wait, END_SECONDS)
        lines = launched.said().splitlines()
        report.audit = next((line for line in lines if line.startswith("audit of")), "no audit")
        if status != 0:
            report.failure = f"exit status {status}: {lines[-1]}"
        elif "0 lost, 0 twice, 0 stuck" not in report.audit:
            report.failure = report.audit
    except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as error:
        report.failure = str(error) or repr(error)
    finally:
        launched.close()
    report.seconds = round(time.monotonic() - began, 1)
    return report


async def _until_all_work(launched: Launched, client: AsyncClient) -> None:
    """Wait for a new step, to which both rollouts have put groups since the last start of either."""
    before = len(steps_of(launched))
    await asyncio.to_thread(
        launched.wait_until, lambda: len(steps_of(launched)) > before, f"a step after {before}", READY_SECONDS
    )
    async with asyncio.timeout(READY_SECONDS):
        while len(members := await _rollouts(client)) < 2 or not all(map(_groups, members)):
            launched.must_run()
            await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Reading:
    """What a rollout has done since its start: groups, and seconds in which its threads ran, and were ready to run."""

    at: float
    groups: float
    ran: float
    ready: float


def _share(first: Reading, last: Reading) -> float:
    """Return the part of the time in which its threads were ready that they ran."""
    return max(last.ran - first.ran, 1e-6) / max(last.ready - first.ready, 1e-6)


async def _stop(launched: Launched, client: AsyncClient, name: str, chance: random.Random, seconds: float) -> Hang:
    """Stop a process of the target; return when it has ended, and a new step was trained."""
    target = TARGETS[name]
    hang = Hang(name, target.deadline_seconds)
    pids = await asyncio.to_thread(until_there, launched, target.command)
    if name == "trainer rank":  # rank 1: rank 0's process has the service's event loop
        pids = [pid for pid in pids if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    chosen = chance.choice(sorted(pids))
    own = {ancestor.pid for ancestor in psutil.Process(chosen).parents()}
    victim = psutil.Process(process_of(chosen))
    others = {address: pid for address in await _rollouts(client) if (pid := _listener(address)) not in own}
    first = {address: _reading(address, pid) for address, pid in others.items()}
    await asyncio.sleep(seconds)
    stopped, stepped = time.monotonic(), len(steps_of(launched))
    victim.send_signal(signal.SIGSTOP)
    second = {address: _reading(address, pid) for address, pid in others.items()}
    while time.monotonic() < stopped + target.deadline_seconds + GRACE_SECONDS and _is_there(victim):
        await asyncio.sleep(0.05)
    if not _is_there(victim):
        hang.ended_after = time.monotonic() - stopped
    await asyncio.sleep(max(0.0, stopped + seconds - time.monotonic()))
    for address, pid in others.items():
        one, two, three = first[address], second[address], _reading(address, pid)
        before, during = (two.groups - one.groups) / (two.at - one.at), three.groups - two.groups
        due = KEPT * before * (three.at - two.at) * min(1.0, _share(two, three) / _share(one, two))
        hang.rates[address] = before, during / (three.at - two.at), due / (three.at - two.at)
        if during < due - 2 * math.sqrt(due):
            hang.slow.append(address)
    await asyncio.to_thread(
        launched.wait_until, lambda: len(steps_of(launched)) > stepped, f"a step after {stepped}", READY_SECONDS
    )
    hang.stepped_after = time.monotonic() - stopped
    return hang


async def _rollouts(client: AsyncClient) -> list[str]:
    return [member.address for member in (await client.get_run(RUN)).members if member.kind == "rollout"]


def _reading(address: str, pid: int) -> Reading:
    """Read what the rollout at an address, the process `pid`, has done."""
    ran = waited = 0
    for process in (pid, *(process_of(child.pid) for child in psutil.Process(pid).children(recursive=True))):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                one, other, _ = map(int, (thread / "schedstat").read_text().split())
                ran, waited = ran + one, waited + other
    return Reading(time.monotonic(), _groups(address), ran / 1e9, (ran + waited) / 1e9)


def _groups(address: str) -> float:
    """Return the groups of a rollout that the broker accepted since its start; 0 while it starts."""
    host, _, port = address.rpartition(":")
    try:
        with urllib.request.urlopen(f"http://{host}:{int(port) + METRICS_OFFSET}/metrics", timeout=10) as page:
            found = _ACCEPTED.search(page.read().decode())
    except OSError:
        return 0.0
    return float(found[1]) if found else 0.0


def _listener(address: str) -> int:
    """Return the process that listens at an address."""
    port = int(address.rpartition(":")[2])
    listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    return next(each.pid for each in listening if each.laddr.port == port and each.pid)


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
