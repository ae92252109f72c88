"""A trainer that hangs is noticed: what counts as work, and when it has hung. A rank that is stopped in a step:
test_service.py."""

import asyncio

import psutil
import pytest
from fake_broker import FakeBroker
from quartet.v1 import trainer_pb2
from trainer_process import Start
from training import Train

from quartet_server.stall import LEAST_SECONDS
from quartet_trainer.progress import PROGRESS
from quartet_trainer.stall import FIRST_STEP_SECONDS, StallWatch
from quartet_trainer.status import Status


@pytest.mark.timeout(120)
def test_a_rank_ends_whose_rank_0_is_stopped(trainer: Start):
    process = trainer("trainer.ranks=2", "trainer.stall_seconds=2")
    process.wait_for(process.children, 60)
    (rank,) = process.children()
    process.own().suspend()
    process.wait_for(lambda: rank.status() == psutil.STATUS_ZOMBIE, 60)
    process.own().resume()
    status, said = process.outcome(60)
    assert status == 1 and "rank 1 ended with status 1" in said, said
    assert "rank 1 waits: the process that started it has been stopped for 2." in said


def look(watch: StallWatch, seconds: float = 0.8, times: int = 5) -> bool:
    return any(watch.observe(watch.look(), seconds) for _ in range(times))


def stalled(why: str) -> None:
    pytest.fail(why)


@pytest.mark.parametrize("phase", trainer_pb2.TrainerPhase.values())
def test_what_counts_as_work_and_what_as_a_wait(phase: int):
    status = Status("run")
    watch = StallWatch(0, status, 3.0, stalled)
    works = trainer_pb2.TrainerPhase.Name(phase).endswith(("TRAINING", "PUBLISHING", "CHECKPOINTING"))
    status.enter(phase)
    assert look(watch) == works
    status.wait_for("broker")
    assert not look(watch)
    status.wait_for("")
    for _ in range(5):
        assert not look(watch, times=3)
        PROGRESS.advance()
    with status.during(phase, allowed=3.0):
        assert not look(watch)
    assert not look(watch, times=3), "the phase has changed"
    assert look(watch, times=2) == works


def test_the_default_limit_has_time_for_the_first_step_and_follows_the_slowest_part():
    status = Status("run")
    watch = StallWatch(0, status, None, stalled)
    assert watch.limit == FIRST_STEP_SECONDS + LEAST_SECONDS
    status.batches = 1
    assert watch.limit == LEAST_SECONDS
    status.enter(trainer_pb2.TRAINER_PHASE_TRAINING)
    assert not look(watch, 1.0, 101)
    PROGRESS.advance()
    assert not look(watch, 1.0, 900) and watch.limit == pytest.approx(1010)


@pytest.mark.timeout(60)
def test_a_step_that_is_held_is_noticed_and_a_batch_that_does_not_come_is_not(train: Train, broker: FakeBroker):
    broker.change(batches_allowed=2)
    training, found = train(), []
    go_on = training.start_held(1)
    watch = StallWatch(0, training.status, 0.6, found.append)
    asyncio.run(asyncio.wait_for(watch.run(), 20))
    assert found[0].startswith("rank 0 has done no part of its work for 0.") and "phase training" in found[0]
    go_on.set()
    broker.wait_until(lambda: broker.trained == [0, 1])
    patient = StallWatch(0, training.status, 0.6, stalled)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(patient.run(), 2.0))
