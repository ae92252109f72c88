"""The chaos runs of the tests, side by side: they wait most of the time; together they cost little more than one."""

import asyncio
import functools
from dataclasses import dataclass
from pathlib import Path

import chaos
import network
import pytest
from schedule import Fault, draw
from town import Plan

SEED = 20
GROUPS, FAULTS = 300, 20
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


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """The short form and the controls, by name."""
    root = tmp_path_factory.mktemp("chaos")
    return asyncio.run(_all(root))


async def _all(root: Path) -> dict[str, Done]:
    # It dies right after its first commit, before the checkpoint that would have held the step.
    trapped = (Fault(5, "trap", "committed"),)
    tail = (Fault(10, "lose-tail", "redis"),)
    # One process of each service is enough to see what one trainer does wrong.
    small = functools.partial(Plan, groups=40, each=1)
    everysec = functools.partial(small, durability="everysec")
    controls = {
        "commit without checkpoint": (trapped, small(root / "commit", control="commit-without-checkpoint")),
        "open without consumed": (tail, everysec(root / "open", control="open-without-consumed")),
        "lost tail": (tail, everysec(root / "tail")),
    }
    faults = "faults of all kinds", tuple(draw(SEED, GROUPS, FAULTS)), Plan(root / "faults", GROUPS)

    async def one_by_one() -> dict[str, Done]:
        return {name: await _one(name, *what) for name, what in controls.items()}

    done, of_controls = await asyncio.gather(_one(*faults), one_by_one())
    return {faults[0]: done, **of_controls}


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
