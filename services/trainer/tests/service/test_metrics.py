"""What the trainer exports while it trains: its phase, its steps, its newest checkpoint."""

import time

import pytest
from fake_broker import FakeBroker
from prometheus_client import REGISTRY
from training import Train

pytestmark = pytest.mark.timeout(180)


def read(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"quartet_trainer_{name}", {"run": "test", **labels})


def phases() -> set[str]:
    """Return the phases that are the current one."""
    (family,) = (family for family in REGISTRY.collect() if family.name == "quartet_trainer_phase")
    return {each.labels["phase"] for each in family.samples if each.labels["run"] == "test" and each.value}


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, (phases(), read("step"))
        time.sleep(0.01)


def test_phase_and_step_are_the_current_ones_also_in_a_wait_and_a_pause(train: Train, broker: FakeBroker):
    broker.change(batches_allowed=1)
    training = train().start()
    broker.wait_until(lambda: broker.trained == [0])
    until(lambda: read("step") == 1 and phases() == {"waiting_for_batch"})
    training.control.pause()
    until(lambda: phases() == {"paused"})
    training.control.resume()
    until(lambda: phases() == {"waiting_for_batch"})
    broker.change(batches_allowed=10**9)
    assert training.join() == "all steps are done"
    assert read("step") == 3


def test_the_newest_checkpoints_time_is_exported_and_before_the_first_that_of_the_start(
    train: Train, broker: FakeBroker
):
    began = time.time()
    first = train("trainer.checkpoint.interval=1")
    assert began <= read("checkpoint_timestamp_seconds") <= time.time()
    broker.change(batches_allowed=1)
    first.start()
    broker.wait_until(lambda: broker.committed == [1])
    until(lambda: first.status.checkpoint_step == 1)
    saved = read("checkpoint_timestamp_seconds")
    assert began < saved <= time.time()
    first.control.stop()
    first.join()
    again = train()
    assert read("checkpoint_timestamp_seconds") > saved, "not read yet"
    broker.change(batches_allowed=1)
    again.start()
    until(lambda: again.status.step >= 1)
    until(lambda: abs(read("checkpoint_timestamp_seconds") - saved) < 1)
    again.control.stop()
    again.join()
