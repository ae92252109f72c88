"""The signals form of `make chaos`: one `quartet run`, with signals to all of its processes except the launcher.

The processes are guards, Redis, the four services with a real model and engine, the engine's process and the verifiers'
workers. The seed determines targets and signals. Most signals wait for a new step after the last one; some are sent
immediately, so that they hit processes that are starting.
"""

import asyncio
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "deploy" / "local" / "tests"))

from launched import Launched, preloaded_checkout, process_of  # noqa: E402
from preloaded import Pythons, make_models  # noqa: E402
from started import write_demo_run  # noqa: E402

from quartet_client import AsyncClient, QuartetError  # noqa: E402

READY_SECONDS = 180.0  # for the first step, and for a step after a signal
END_SECONDS = 240.0  # from the last signal to the end of the run
STOP_SECONDS = (1.0, 5.0)
AT_ONCE = 0.25  # share of the signals that do not wait for a step

# Parts of the processes' command lines, with their names after them.
TARGETS = {
    "redis": "redis-server",
    "broker": "-m quartet_broker ",
    "reward": "-m quartet_reward ",
    "verifier worker": "-m quartet_reward.math.worker",
    "rollout": "-m quartet_rollout ",
    "engine": " transformers ",  # the fork's name
    "trainer": "-m quartet_trainer ",
    "guard": "guard.py",
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


@dataclass(frozen=True)
class Blow:
    """One signal to a target, after `pause` seconds; a stopped process resumes after `seconds`."""

    target: str
    number: signal.Signals
    pause: float
    at_once: bool
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.number.name} to {self.target}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


@dataclass
class Report:
    """The result of a run under signals; `right` if it has no fault."""

    seed: int
    due: int
    done: int = 0
    steps: int = 0
    restarts: int = 0
    seconds: float = 0.0
    audit: str = ""
    failure: str = ""
    right: bool = False
    blows: list[str] = field(default_factory=list)

    def line(self) -> str:
        what = self.failure.partition("\n")[0] or self.audit
        return (
            f"seed {self.seed}: {what} ({self.done} of {self.due} signals, {self.restarts} restarts, "
            f"{self.steps} steps, {self.seconds:.0f} s)"
        )

    def judge(self, launched: Launched, status: int) -> None:
        """Note the audit of a run that has ended with this exit status, and what is wrong."""
        lines = launched.said().splitlines()
        self.audit = next((line for line in lines if line.startswith("audit of")), "no audit")
        if status != 0:
            self.failure = f"exit status {status}: {lines[-1]}"
        elif left := launched.processes():
            self.failure = f"left behind: {left}"
        elif "0 lost, 0 twice, 0 stuck" not in self.audit:
            self.failure = self.audit

    def count(self, launched: Launched) -> None:
        """Note steps and restarts, and whether the run was right."""
        self.steps = len(steps_of(launched))
        self.restarts = launched.said().count("; starting it again (")
        self.right = not self.failure and self.done == self.due


def draw(seed: int, count: int, targets: Mapping[str, str] = TARGETS) -> Iterator[Blow]:
    """Draw signals. Every pair of target and signal is drawn once before any is drawn again."""
    chance = random.Random(f"signals/{seed}")
    pairs: list[tuple[str, signal.Signals]] = []
    for _ in range(count):
        if not pairs:
            deck = [(target, number) for target in targets for number in SIGNALS]
            pairs = chance.sample(deck, len(deck))
        target, number = pairs.pop()
        seconds = round(chance.uniform(*STOP_SECONDS), 1) if number == signal.SIGSTOP else 0.0
        yield Blow(target, number, round(chance.uniform(0, 1.5), 2), chance.random() < AT_ONCE, seconds)


async def run(folder: Path, seed: int, count: int, pythons: Pythons, say: Callable[[str], None]) -> Report:
    """Execute a run under signals in a new folder, with preloaded services."""
    report = Report(seed, count)
    began = time.monotonic()
    folder.mkdir(parents=True)
    make_models(pythons["trainer"], folder / "model")
    queue = {"groups_per_step": 4, "max_staleness": 1}
    sections = {"data": {"passes": 100_000}, "trainer.checkpoint": {"interval": 5}}
    run_file = write_demo_run(folder, "signals", run=queue, **sections)
    checkout = preloaded_checkout(folder / "checkout", pythons)
    launched = Launched([str(run_file)], folder / "output.txt", checkout=checkout)
    try:
        await strike(launched, list(draw(seed, count)), report, say)
        await end_prompts(run_file, "signals")
        report.judge(launched, await asyncio.to_thread(launched.wait, END_SECONDS))
    except (AssertionError, TimeoutError, QuartetError, subprocess.TimeoutExpired) as error:
        report.failure = str(error) or repr(error)
    finally:
        launched.close()
    report.seconds = round(time.monotonic() - began, 1)
    report.count(launched)
    return report


async def strike(
    launched: Launched,
    blows: list[Blow],
    report: Report,
    say: Callable[[str], None],
    targets: Mapping[str, str] = TARGETS,
) -> None:
    """Send the signals to processes of the run, most of them after a new step; `targets`: parts of command lines."""
    chance = random.Random(f"victims/{report.seed}")
    waking: list[asyncio.Task] = []
    before = 0
    try:
        for blow in blows:
            if not blow.at_once or not before:
                trained = functools.partial(lambda before: len(steps_of(launched)) > before, before)
                await asyncio.to_thread(launched.wait_until, trained, f"a step after {before}", READY_SECONDS)
            await asyncio.sleep(blow.pause)
            # A killed worker is restarted only when a verification needs it; until then the service is the target.
            others = (targets["reward"],) if blow.target == "verifier worker" else ()
            commands = (targets[blow.target], *others)
            pids = await asyncio.to_thread(until_there, launched, *commands)
            pid = chance.choice(sorted(pids))
            before = len(steps_of(launched))
            with suppress(ProcessLookupError, FileNotFoundError):  # it has just exited by itself
                pid = process_of(pid)  # a preloaded one's proxy forwards no SIGSTOP
                os.kill(pid, blow.number)
            report.done += 1
            report.blows.append(f"{before}: {blow} ({pid})")
            say(f"{report.done:3} after {before:4} steps: {blow}")
            if blow.seconds:
                waking.append(asyncio.create_task(_wake(pid, blow.seconds)))
    finally:
        await asyncio.gather(*waking)


async def end_prompts(run_file: Path, run_id: str) -> None:
    """End the prompts of a run, which the last signal may have left without Redis or the broker."""
    async with AsyncClient.from_config(run_file, timeout=60) as client, asyncio.timeout(READY_SECONDS):
        while True:
            try:
                return await client.end_prompts(run_id)
            except QuartetError as error:
                if error.code != grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.5)


async def _wake(pid: int, seconds: float) -> None:
    await asyncio.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def steps_of(launched: Launched) -> list[str]:
    return [line for line in launched.said().splitlines() if line.startswith("step ")]


def until_there(launched: Launched, *wanted: str) -> list[int]:
    """Wait for processes of the first of these commands of which there are any; return their pids."""
    found: list[int] = []

    def look() -> bool:
        # Workers do not inherit the environment mark, so descendants are searched.
        commands = {}
        for process in psutil.Process(process_of(launched.pid)).children(recursive=True):
            with suppress(psutil.Error, OSError):  # it has exited
                service = psutil.Process(process_of(process.pid))
                commands[service.pid] = " ".join(process.cmdline()) + " "
                below = service.children(recursive=True) if service != process else ()
                commands |= {each.pid: " ".join((*each.cmdline(), each.name())) + " " for each in below}
        guards = {pid for pid, line in commands.items() if TARGETS["guard"] in line}
        for command in wanted:
            among = guards if command == TARGETS["guard"] else commands.keys() - guards
            found[:] = found or [pid for pid in among if command in commands[pid]]
        return bool(found)

    launched.wait_until(look, f"a process '{wanted[0]}'", READY_SECONDS)
    return found


def explain(report: Any, folder: Path) -> str:
    """Return the information needed to diagnose a failed run, this form's or that of `hangs`."""
    lines = [report.line(), "", *getattr(report, "blows", ()), "", (folder / "output.txt").read_text()[-6000:]]
    for log in sorted((folder / "run" / "logs").glob("*.log")):
        lines += ["", f"{log}:", *log.read_text(errors="replace").splitlines()[-12:]]
    return "\n".join(lines)
