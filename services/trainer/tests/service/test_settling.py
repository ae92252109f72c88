"""A trainer beside a broker whose books end before its checkpoint: it settles its ledger, or does not start."""

import logging

import pytest
from fake_broker import FakeBroker
from quartet.v1 import broker_pb2
from test_loop import names_of
from training import Train, live_until

from quartet_common.ledger import ledger_digest
from quartet_trainer.errors import TrainingError

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def behind(train: Train, broker: FakeBroker) -> Train:
    """A trainer with a checkpoint of 2 steps; the broker's books end at step 1."""
    live_until(train, broker, 2)
    broker.change(settle_from=1, ledger_digest=ledger_digest([names_of(0)]))
    broker.run.policy_version = broker.run.committed_step = 1
    return train


def test_the_ledgers_lines_are_settled_before_the_first_batch(behind: Train, broker: FakeBroker, caplog):
    caplog.set_level(logging.WARNING)
    behind("trainer.checkpoint.interval=1").start().join()
    assert broker.settled == [(1, names_of(1))] and broker.trained == [0, 1, 2]
    assert broker.opened[-1].settles_ledger and broker.opened[-1].checkpoint_step == 2
    assert "books at step 1, checkpoint at step 2" in caplog.text


def test_books_of_another_history_are_refused(behind: Train, broker: FakeBroker):
    broker.change(ledger_digest=ledger_digest([names_of(7)]))
    with pytest.raises(TrainingError, match="books at step 1, checkpoint at step 2: .* different histories"):
        behind().start().join()
    assert not broker.settled and broker.trained == [0, 1]


def test_a_ledger_with_a_hole_is_refused(behind: Train, broker: FakeBroker, tmp_path):
    for folder in (tmp_path / "run" / "checkpoints").glob("step-*"):
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"ledger"', '"not the ledger"'))
    with pytest.raises(TrainingError, match="books at step 1, checkpoint at step 2: .* lacks step 0"):
        behind().start().join()
    assert not broker.settled and broker.trained == [0, 1]


@pytest.mark.parametrize(("books", "warned"), [(0, True), (1, False)])
def test_a_broker_of_before_is_told_the_ids_of_the_last_steps(
    train: Train,
    broker: FakeBroker,
    caplog,
    books: int,
    warned: bool,
):
    caplog.set_level(logging.WARNING)
    first = train("trainer.checkpoint.interval=1").start()
    first.join()
    broker.run.state = broker_pb2.RUN_STATE_ACTIVE
    broker.run.spec.max_steps, broker.run.policy_version = 4, books
    train().start().join()
    assert list(broker.opened[-1].consumed_instance_ids) == names_of(1) + names_of(2)
    assert ("takes no ledger: groups of the steps 0 to 2 may be trained again" in caplog.text) == warned
