"""The ranks' rendezvous, each rank a process on this host; over several hosts: tests/hosts."""

import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import Forked

from quartet_common.config import ConfigError
from quartet_common.ports import free_port
from quartet_trainer.config import TrainerSection
from quartet_trainer.errors import TrainingError
from quartet_trainer.launch import leave_process
from quartet_trainer.launch import rank as own_rank
from quartet_trainer.learner.distributed import Announcements, initialize, shutdown
from quartet_trainer.rendezvous import Rendezvous

SECONDS = 3.0  # where it is waited for
START_SECONDS = 20.0  # of a fork, on a busy machine


def meet(seconds: float, interface: str) -> None:
    """Meet and form the process group; a failure is written as the service would log it, with its exit status."""
    begin = time.monotonic()
    try:
        _kept = Rendezvous(TrainerSection(rendezvous_seconds=seconds, interface=interface))
        initialize(seed=0)
        dist.barrier()
        shutdown()
    except (ConfigError, TrainingError) as error:
        print(f"after {time.monotonic() - begin:.1f} s: {error}", file=sys.stderr)
        leave_process(2 if isinstance(error, ConfigError) else 1)
    leave_process(0)


def follow(seconds: float, interface: str, leaves: str) -> None:
    """As the service's ranks: rank 0 ends before or after the group of its announcements is created."""
    _kept = Rendezvous(TrainerSection(rendezvous_seconds=seconds, interface=interface))
    if own_rank() == 0:
        initialize(seed=0)
        if leaves == "after":
            Announcements().send("ready")
        leave_process(0)
    with pytest.raises(TrainingError, match="process group failed to form: |rank 0 of the training job is lost: "):
        initialize(seed=0)
        announcements = Announcements()
        if leaves == "after":
            assert announcements.receive()[0] == "ready"
        announcements.receive()
    leave_process(0)


class Ranks:
    """Starts ranks of one job."""

    def __init__(self, folder: Path):
        self.port = free_port()
        self._folder = folder
        self.started: list[Forked] = []

    def start(
        self, rank: int, world_size: int = 2, interface: str = "", seconds: float = START_SECONDS, does: Callable = meet
    ) -> None:
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        errors = self._folder / f"{len(self.started)}.stderr"
        environment = {**place, "MASTER_PORT": str(self.port)}
        self.started.append(Forked(errors, does, seconds, interface, environment=environment))

    def sentences(self, *statuses: int) -> list[str]:
        """Wait for all; return what each has failed with, one sentence each and before its deadline."""
        assert [rank.wait(60) for rank in self.started] == [*statuses]
        found = [re.findall(r"after (\d+\.\d) s: (.*)\n", rank.said()) for rank in self.started]
        assert all(len(each) == 1 and float(each[0][0]) < START_SECONDS + SECONDS for each in found), found
        return [sentence for ((_, sentence),) in found]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for each in made.started:
        each.end()


@pytest.mark.parametrize(
    ("start", "status", "sentence"),
    [
        (lambda ranks: (ranks.start(0, 2), ranks.start(1, 3)), 2, "WORLD_SIZE: got ., but rank . on .* has .; set the"),
        (lambda ranks: (ranks.start(0, 3), ranks.start(1, 2)), 2, "WORLD_SIZE: got ., but rank . on .* has .; set the"),
        (
            lambda ranks: (ranks.start(0), ranks.start(1, interface="eth77")),
            2,
            r"rank 1 on .*: trainer.interface: this host has no .* 'eth77' with an address; allowed: .*lo \(127.0.",
        ),
        (
            lambda ranks: [ranks.start(rank, 3) for rank in (0, 1, 1)],
            2,
            "rank 1 on .*: RANK: another process has it too; set a different one for each",
        ),
        (
            lambda ranks: [ranks.start(rank, 4, seconds=SECONDS) for rank in (0, 2)],
            1,
            r"no answer of rank 1, 3 within 3 s \(trainer.rendezvous_seconds\); start it with the same WORLD_SIZE",
        ),
    ],
    ids=["a larger world", "a smaller world", "no such interface", "two of one rank", "missing ranks"],
)
def test_all_ranks_that_came_end_with_one_sentence(
    ranks: Ranks, start: Callable[[Ranks], object], status: int, sentence: str
):
    start(ranks)
    said = ranks.sentences(*[status] * len(ranks.started))
    assert len(set(said)) == 1 and re.search(sentence, said[0]), said


def test_a_rank_without_rank_0_ends_at_its_deadline(ranks: Ranks):
    ranks.start(1, seconds=SECONDS)
    where = re.escape(f"127.0.0.1:{ranks.port} (MASTER_ADDR, MASTER_PORT)")
    (said,) = ranks.sentences(1)
    assert re.search(f"cannot reach rank 0 at {where} within 3 s .*: Connection refused; start rank 0", said)


def test_a_port_of_another_program_ends_every_rank(ranks: Ranks):
    with socket.create_server(("0.0.0.0", ranks.port)):
        ranks.start(0, seconds=SECONDS)
        ranks.start(1, seconds=SECONDS)
        first, second = ranks.sentences(1, 1)
    assert "rank 0 cannot serve" in first and "already in use; set a port that nothing else uses" in first
    assert "rank 0 cannot serve" in second and "another program listens there" in second


def test_ranks_on_an_interface_meet(ranks: Ranks):
    ranks.start(0, interface="lo", seconds=60)
    ranks.start(1, seconds=60)
    assert [rank.wait(60) for rank in ranks.started] == [0, 0]


@pytest.mark.parametrize("leaves", ["before", "after"])
def test_a_rank_that_follows_says_that_rank_0_is_lost(ranks: Ranks, leaves: str):
    for rank in range(2):
        ranks.start(rank, seconds=60, does=partial(follow, leaves=leaves))
    assert [rank.wait(60) for rank in ranks.started] == [0, 0], [rank.said() for rank in ranks.started]
