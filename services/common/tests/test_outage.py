"""When an outage begins, what ends it, and how often it is spoken of."""

from types import SimpleNamespace

import pytest

from quartet_common import outage as module
from quartet_common.outage import Outage


@pytest.fixture
def clock(monkeypatch):
    """The clock of outages, to be put forward."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_it_begins_with_the_first_failure_and_any_answer_ends_it(clock):
    outage = Outage(patience=10)
    clock.now += 60  # a call that waits for news
    outage.failed()
    assert outage.seconds == 0 and not outage.given_up
    clock.now += 9
    outage.failed()
    assert outage.seconds == 9 and not outage.given_up
    outage.failed(answered=True)
    clock.now += 9
    outage.failed()
    assert outage.seconds == 0
    clock.now += 10
    assert outage.given_up
    assert outage.over() and not outage.over() and outage.seconds == 0


def test_pauses_double_and_are_never_shorter_than_the_server_asks(clock):
    outage = Outage()
    assert [outage.failed() for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert outage.failed(suggested=3.0) == 3.0
    outage.over()
    assert outage.failed() == 0.1
