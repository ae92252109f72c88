"""How idle a service says it is: by hand, on a clock that stands still until it is told to go on."""

import pytest

from quartet_common.handshake import Idleness


class Clock:
    """Seconds that passed, of the wall, of the processor, and with work elsewhere."""

    def __init__(self) -> None:
        self.wall, self.processor, self.elsewhere = 100.0, 3.0, 7.0

    def monotonic(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.processor

    def go(self, wall: float, processor: float, elsewhere: float) -> None:
        self.wall += wall
        self.processor += processor
        self.elsewhere += elsewhere


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("quartet_common.handshake.time", clock)
    return clock


def test_the_busier_of_process_and_workers_counts_over_the_last_minute(clock: Clock) -> None:
    measured = Idleness(lambda: clock.elsewhere)
    assert measured.fraction() is None
    clock.go(wall=1.0, processor=0.25, elsewhere=0.0)
    assert measured.fraction() == pytest.approx(0.75)
    clock.go(wall=3.0, processor=0.2, elsewhere=2.0)
    assert measured.fraction() == pytest.approx(0.5)
    clock.go(wall=59.0, processor=236.0, elsewhere=0.0)  # four threads
    assert measured.fraction() == 0.0
    clock.go(wall=60.0, processor=6.0, elsewhere=0.0)
    assert measured.fraction() == pytest.approx(0.9), "what is longer ago does not count"
