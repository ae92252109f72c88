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


def test_the_busier_of_process_and_workers_counts(clock: Clock) -> None:
    measured = Idleness(lambda: clock.elsewhere)
    assert measured.fraction is None
    clock.go(wall=1.0, processor=0.25, elsewhere=0.0)
    measured.look()
    assert measured.fraction == pytest.approx(0.75)
    clock.go(wall=2.0, processor=0.2, elsewhere=1.0)  # half of the time
    measured.look()
    assert measured.fraction == pytest.approx((0.75 + 0.5) / 2)
    clock.go(wall=1.0, processor=4.0, elsewhere=0.0)  # four threads
    measured.look()
    assert measured.fraction == pytest.approx((0.75 + 0.5 + 0.0) / 3)
