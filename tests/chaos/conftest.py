"""The chaos runs of the tests, side by side: they wait most of the time; together they cost little more than one."""

import asyncio
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import chaos
import network
import pytest
from schedule import RESTORE_DECK, Fault, draw
from town import HERE, Plan

from quartet_local import guard

SEED = 20
GROUPS, FAULTS = 300, 20
RESTORE_GROUPS, RESTORE_FAULTS = 200, 20
NETWORK_GROUPS, NETWORK_FAULTS = 60, 6
LIMIT_SECONDS = 200.0

_lines: list[str] = []


@dataclass(frozen=True)
class Done:
    """A chaos run that came to its end, or did not."""

    report: chaos.Report
    schedule: tuple[Fault, ...]
    folder: Path

    def explained(self) -> str:
        """Return seed, schedule, where the logs are, and what went wrong."""
        return chaos.explain(self.report, self.schedule, self.folder)


@dataclass(frozen=True)
class Runs:
    """All chaos runs of the tests.

    Attributes:
        done: those on loopback, by name.
        network: exit status and output of the network form; None where it cannot run: `why_not` then.
    """

    done: dict[str, Done]
    network: tuple[int, str] | None
    why_not: str = ""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The short form, the controls, the network form."""
    return asyncio.run(_all(tmp_path_factory.mktemp("chaos")))


async def _all(root: Path) -> Runs:
    # It dies right after its first commit, before the checkpoint that would have held the step.
    trapped = (Fault(5, "trap", "committed"),)
    tail = (Fault(10, "lose-tail", "redis"),)
    back = (Fault(5, "snapshot", "redis"), Fault(15, "restore", "redis"))
    # One process of each service is enough to see what one trainer does wrong.
    small = functools.partial(Plan, groups=40, each=1)
    everysec = functools.partial(small, durability="everysec")
    others = {
        "commit without checkpoint": (trapped, small(root / "commit", control="commit-without-checkpoint")),
        "lost tail": (tail, everysec(root / "tail")),
        "settle without instances": (back, small(root / "settle", control="settle-without-instances")),
        "older state": (back, small(root / "older")),
    }
    name, schedule, plan = "faults of all kinds", tuple(draw(SEED, GROUPS, FAULTS)), Plan(root / "faults", GROUPS)
    restores = tuple(draw(SEED, RESTORE_GROUPS, RESTORE_FAULTS, RESTORE_DECK))

    async def one_by_one() -> dict[str, Done]:
        done = {name: await _one(name, *what) for name, what in others.items()}
        return done | {"restores": await _one("restores", restores, Plan(root / "restores", RESTORE_GROUPS))}

    async def network_form() -> tuple[int, str] | None:
        return None if why_not else await _network(root / "network")

    why_not = network.why_not()
    first, done, of_network = await asyncio.gather(_one(name, schedule, plan), one_by_one(), network_form())
    return Runs({name: first, **done}, of_network, why_not)


async def _network(folder: Path) -> tuple[int, str]:
    size = ["--groups", str(NETWORK_GROUPS), "--faults", str(NETWORK_FAULTS), "--limit", str(LIMIT_SECONDS)]
    where = ["--folder", str(folder), "--results", str(folder / "chaos.json")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", guard.__file__, "10"),
        *(sys.executable, str(HERE / "run.py"), "--network", *size, *where),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()  # it has its own limit, and ends with this process
    text = output.decode(errors="replace")
    tell(next((line for line in text.splitlines() if line.startswith("network    ")), "network: it said nothing"))
    return process.returncode or 0, text


async def _one(name: str, schedule: tuple[Fault, ...], plan: Plan) -> Done:
    say = functools.partial(print, f"{name}:")
    report = await chaos.run(plan, network.Loopback(), schedule, SEED, LIMIT_SECONDS, say)
    tell(f"{name}: {report.line()}")
    return Done(report, schedule, plan.folder)


def tell(line: str) -> None:
    """Have a line printed when all tests are done."""
    _lines.append(line)


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the result of each chaos run, in one line."""
    for line in _lines:
        terminalreporter.write_line(line)
