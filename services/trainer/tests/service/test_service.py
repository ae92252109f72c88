"""The whole trainer as a process: command line, server, signals, exit status, with a real learner on a tiny model."""

import json
import signal
import time
from pathlib import Path

import pytest
from fake_broker import FakeBroker
from grpc_health.v1 import health_pb2
from receiver import Receivers
from trainer_process import Start

from quartet_common.ports import free_port
from quartet_trainer.status import Phase, phase_name

pytestmark = pytest.mark.timeout(600)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


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


def test_two_ranks_train_the_same_run_and_go_on_after_one_was_stopped(
    trainer: Start, broker: FakeBroker, receiver: Receivers
):
    one = receiver("one")
    broker.add_member(one.member)
    broker.change(batches_allowed=2)
    process = trainer("trainer.ranks=2", "trainer.checkpoint.interval=2", "trainer.stall_seconds=5")
    health = process.health()
    assert next(health).status == NOT_SERVING and not broker.opened, "it is not ready before its session is open"
    assert next(health).status == SERVING and broker.opened
    assert process.status().world_size == 2
    broker.wait_until(lambda: broker.committed == [2], 180)
    process.wait_for(lambda: process.status().phase == Phase.TRAINER_PHASE_WAITING_FOR_BATCH)
    (rank,) = process.children()
    rank.suspend()
    began = time.monotonic()
    broker.change(batches_allowed=10**9)
    assert next(health).status == NOT_SERVING
    health.cancel()
    status, said = process.outcome(60)
    assert 5 <= time.monotonic() - began < 30
    assert status == 1 and "Traceback" not in said, said
    (sentence,) = [line for line in said.splitlines() if " ERROR " in line]
    assert "the trainer has stalled: rank 0 has done no part of its work for 5." in sentence
    assert "by trainer.stall_seconds the limit is 5" in sentence
    assert not rank.is_running() and len(broker.left) == 1

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
