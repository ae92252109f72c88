"""The chaos runs of the tests, executed concurrently because they mostly wait."""

import asyncio
import functools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import chaos
import network
import pytest
import run
from deployment import Plan
from preloaded import Pythons
from schedule import RESTORE_DECK, Fault, draw

SEED = 20
GROUPS, FAULTS = 300, 20
RESTORE_GROUPS, RESTORE_FAULTS = 200, 20
NETWORK_GROUPS, NETWORK_FAULTS = 60, 6
LIMIT_SECONDS = 300.0


@pytest.fixture(scope="session")
def pythons() -> Iterator[Pythons]:
    with closing(Pythons()) as made:
        yield made


@pytest.fixture(scope="session")
def runs(pythons: Pythons, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The reports of the short form and the controls by name; "network": the result of that form."""
    return asyncio.run(_all(tmp_path_factory.mktemp("chaos"), pythons))


async def _all(root: Path, pythons: Pythons) -> dict:
    # The trainer dies after a commit, before the checkpoint with that step.
    trapped = (Fault(5, "trap", "committed-unsaved"),)
    # Steps are trained in between: without a lead, at most 25 groups before the snapshot.
    back = (Fault(5, "snapshot", "redis"), Fault(45, "restore", "redis"))
    restores = tuple(draw(SEED, RESTORE_GROUPS, RESTORE_FAULTS, RESTORE_DECK))
    # One process of each service is enough for one trainer's fault.
    small = functools.partial(Plan, each=1, lead=0)
    others = {
        "commit without checkpoint": (trapped, small(root / "commit", 40, control="commit-without-checkpoint")),
        "settle without instances": (back, small(root / "settle", 80, control="settle-without-instances")),
        "restores": (restores, Plan(root / "restores", RESTORE_GROUPS)),
    }

    async def one_by_one() -> dict[str, chaos.Report]:
        return {name: await _one(pythons, *what) for name, what in others.items()}

    everything = _one(pythons, tuple(draw(SEED, GROUPS, FAULTS)), Plan(root / "faults", GROUPS))
    size = {"groups": NETWORK_GROUPS, "faults": NETWORK_FAULTS, "seed": 1, "limit": LIMIT_SECONDS}
    cut = asyncio.to_thread(run.network_form, folder=root, **size)
    done, first, of_network = await asyncio.gather(one_by_one(), everything, cut)
    return {**done, "faults of all kinds": first, "network": of_network}


async def _one(pythons: Pythons, schedule: tuple[Fault, ...], plan: Plan) -> chaos.Report:
    say = functools.partial(print, f"{plan.folder.name}:")
    return await chaos.run(plan, network.Loopback(), pythons, schedule, SEED, LIMIT_SECONDS, say)
