"""The fixtures of the service's tests."""

from collections.abc import Iterator

import pytest
from fake_broker import FakeBroker
from receiver import receiver
from trainer_process import basics, trainer
from training import train

__all__ = ["basics", "receiver", "train", "trainer"]


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """A broker with the run 'test' and endless batches."""
    broker = FakeBroker()
    yield broker
    broker.close()
