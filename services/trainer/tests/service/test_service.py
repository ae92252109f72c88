"""The whole trainer as a process: command line, server, signals, exit status, with a real learner on a tiny model."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from fake_broker import FakeBroker
from processes import Forked
from quartet.v1 import trainer_pb2, trainer_pb2_grpc
from receiver import Receivers

from quartet_common.ports import free_port
from quartet_trainer.__main__ import main
from quartet_trainer.status import Phase, phase_name

pytestmark = pytest.mark.timeout(600)


def start_command(options: list[str]) -> None:
    sys.argv = ["quartet-trainer", *options]
    sys.exit(main())


class TrainerProcess(Forked):
    """The command, as a person starts it; with `environment` as torchrun does."""

    def __init__(self, folder: Path, *overrides: str, environment: dict[str, str] | None = None):
        self.port = free_port()
        overrides = (f"addresses.trainer=127.0.0.1:{self.port}", *overrides)
        self.options = [word for override in overrides for word in ("--set", override)]
        super().__init__(folder / f"trainer-{self.port}.stderr", start_command, self.options, environment=environment)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)

    def status(self) -> trainer_pb2.TrainerServiceGetStatusResponse:
        request = trainer_pb2.TrainerServiceGetStatusRequest()
        return self.stub.GetStatus(request, timeout=60, wait_for_ready=True)

    def outcome(self, seconds: float = 120.0) -> tuple[int, str]:
        """Wait for its end; returns its exit status and what it said."""
        return self.wait(seconds), self.said()


@pytest.fixture
def basics(broker: FakeBroker, model_path: Path, tmp_path: Path) -> tuple[str, ...]:
    folder = f"run.folder={tmp_path / 'run'}"
    return (
        "run.id=test",
        "server.metrics=false",
        f"addresses.broker={broker.address}",
        f"model.path={model_path}",
        folder,
    )


Start = Callable[..., TrainerProcess]


@pytest.fixture
def trainer(basics: tuple[str, ...], tmp_path: Path) -> Iterator[Start]:
    """Start trainers of the run 'test'; they are ended after the test."""
    started: list[TrainerProcess] = []

    def start(*overrides: str, environment: dict[str, str] | None = None) -> TrainerProcess:
        started.append(TrainerProcess(tmp_path, *basics, *overrides, environment=environment))
        return started[-1]

    yield start
    for trainer in started:
        trainer.channel.close()
        trainer.end()


def test_sigterm_leaves_a_committed_checkpoint_and_the_next_start_goes_on(
    trainer: Start, broker: FakeBroker, tmp_path: Path
):
    broker.change(batches_allowed=2)
    process = trainer(f"tracing.file={tmp_path / 'spans.json'}")
    broker.wait_until(lambda: broker.trained == [0, 1], 120)
    process.send(signal.SIGTERM)
    status, said = process.outcome(30)
    assert status == 0 and "Traceback" not in said, said
    assert broker.committed == [2]
    assert_phases(tmp_path / "spans.json")
    broker.change(batches_allowed=10**9)
    assert trainer().wait(120) == 0
    assert broker.opened[1].checkpoint_step == 2 and broker.trained == [0, 1, 2]


def assert_phases(path: Path) -> None:
    """The trace holds what the trainer was doing all the time, phase after phase."""
    events = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:]]
    begun = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    names = {phase_name(number).replace("_", " ") for number in Phase.values()}
    phases = sorted((begun[e["id"]], e["ts"], e["name"]) for e in events if e["ph"] == "e" and e["name"] in names)
    assert {name for *_, name in phases} >= {"starting", "training", "waiting for batch", "publishing", "checkpointing"}
    assert sum(end - begin for begin, end, _ in phases) == pytest.approx(phases[-1][1] - phases[0][0], rel=0.05)


def test_two_ranks_train_the_same_run(trainer: Start, broker: FakeBroker, receiver: Receivers):
    one = receiver("one")
    broker.add_member(one.member)
    broker.change(batches_allowed=2)
    process = trainer("trainer.ranks=2", "trainer.checkpoint.interval=2")
    assert process.status().world_size == 2
    broker.wait_until(lambda: broker.committed == [2], 180)
    children = Path(f"/proc/{process.process.pid}/task").glob("*/children")
    (rank,) = (int(pid) for file in children for pid in file.read_text().split())
    os.kill(rank, signal.SIGKILL)
    status, said = process.outcome()
    assert status == 1 and "Traceback" not in said, said
    assert "rank 1 ended with status -9" in said or "a rank of the training job is lost" in said

    broker.change(batches_allowed=10**9)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [trainer(environment={**world, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    assert [rank.wait(120) for rank in ranks] == [0, 0], "started by torchrun they go on, and end together"
    assert broker.trained == [0, 1, 2] and broker.committed == [2, 3]
    assert one.installed(3) != one.installed(0)


def test_what_cannot_be_used_is_one_sentence_and_status_2(trainer: Start):
    """Which sentences: test_preflight.py."""
    status, said = trainer("model.path=/nowhere/model").outcome()
    assert status == 2
    assert "model.path: there is no folder '/nowhere/model'" in said and said.count("\n") == 1, said
