"""Executes a chaos run and checks its result."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deployment import Deployment, Plan
from injection import READY_SECONDS, Injector
from network import Hosts, Loopback
from schedule import Fault, family
from verdict import Verdict, judge

TAIL_LINES = 12


@dataclass
class Report:
    """The result of a chaos run.

    Attributes:
        schedule: faults, of which the first `done` were injected.
        folder: with its data and logs.
        failure: why the run did not end; empty if it did.
        faults: number of injected faults by family.
        starts: of each process, including the first.
        events: number of the stand-ins' events by name: "fenced" sessions, "put lease_lost", …
    """

    seed: int
    groups: int
    schedule: Sequence[Fault]
    folder: Path
    done: int = 0
    failure: str = ""
    faults: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def right(self) -> bool:
        """True if all faults were injected and no check failed."""
        return not self.failure and self.done == len(self.schedule) and self.verdict.right

    def line(self) -> str:
        stats, restarts = self.verdict.stats, sum(self.starts.values()) - len(self.starts)
        facts = (
            f"{self.done} of {len(self.schedule)} faults, {restarts} restarts, "
            f"{stats.get('redelivered', 0)} redeliveries, {stats.get('duplicates', 0)} duplicates refused, "
            f"{self.events.get('fenced', 0)} sessions fenced, {self.seconds:.0f} s"
        )
        return f"seed {self.seed}: {self.failure or self.verdict.line()} ({facts})"

    def explained(self) -> str:
        """Return the information needed to diagnose a failure."""
        lines = [self.line(), "", f"seed {self.seed}; the schedule (committed groups: fault):"]
        for number, fault in enumerate(self.schedule, start=1):
            mark = "done" if number <= self.done else "    "
            lines.append(f"  {mark} {number:4} {fault.at:6}: {fault}")
        if self.verdict.audit:
            lines += ["", "audit:", json.dumps(self.verdict.audit, indent=2)[:4000]]
        lines += ["", "seen by the harness itself:", *(self.verdict.seen or ["nothing wrong"])]
        for log in sorted((self.folder / "logs").glob("*.log")):
            lines += ["", f"{log}:", *log.read_text(errors="replace").splitlines()[-TAIL_LINES:]]
        return "\n".join(lines)

    def save(self) -> None:
        """Write it as report.json."""
        report = {"line": self.line(), "right": self.right, **asdict(self), "folder": str(self.folder)}
        (self.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")


async def run(
    plan: Plan,
    place: Loopback | Hosts,
    pythons: Mapping[str, Path],
    schedule: Sequence[Fault],
    seed: int,
    limit: float,
    say: Callable[[str], None],
) -> Report:
    """Run the plan with a schedule of faults; stop all processes at the end.

    Args:
        pythons: the environments' interpreters.
        limit: timeout in seconds.
        say: prints a line for each fault.
    """
    report = Report(seed, plan.groups, schedule, plan.folder)
    began = time.monotonic()
    deployment = Deployment(plan, place, pythons)
    injector = Injector(deployment, list(schedule), say)
    try:
        async with asyncio.timeout(limit):
            deployment.start()
            await _to_the_end(deployment, injector)
            report.verdict = await judge(deployment)
    except TimeoutError:
        report.failure = (
            deployment.failure or f"not finished within {limit:.0f} s, with {deployment.committed} groups committed"
        )
    except RuntimeError as error:
        report.failure = str(error)
    finally:
        await deployment.close()
    report.seconds = round(time.monotonic() - began, 1)
    report.done = injector.done
    report.faults = dict(Counter(map(family, schedule[: injector.done])))
    report.starts = {name: victim.starts for name, victim in deployment.victims.items()}
    report.events = dict(deployment.events)
    return report


async def _to_the_end(deployment: Deployment, injector: Injector) -> None:
    """Wait until all faults are injected and the run is finished. Raises RuntimeError if it fails."""
    tasks = [asyncio.create_task(work) for work in (injector.run(), deployment.until(lambda: deployment.over))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
    async with asyncio.timeout(READY_SECONDS):
        for victim in deployment.victims.values():
            if victim.kind in ("redis", "broker", "reward"):
                await victim.ready.wait()
