"""How idle a service says it is: by hand, on clocks that stand still until they are told to go on."""

from types import SimpleNamespace

import pytest

from quartet_common.handshake import Idleness


def test_the_busier_of_process_and_workers_counts_over_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {"wall": 100.0, "process": 3.0, "workers": 7.0}
    clock = SimpleNamespace(monotonic=lambda: passed["wall"], process_time=lambda: passed["process"])
    monkeypatch.setattr("quartet_common.handshake.time", clock)
    measured = Idleness(lambda: passed["workers"])
    assert measured.fraction() is None
    for wall, process, workers, fraction in (
        (1.0, 0.25, 0.0, 0.75),
        (3.0, 0.2, 2.0, 0.5),
        (59.0, 236.0, 0.0, 0.0),  # four threads
        (60.0, 6.0, 0.0, 0.9),  # what is longer ago does not count
    ):
        passed["wall"] += wall
        passed["process"] += process
        passed["workers"] += workers
        assert measured.fraction() == pytest.approx(fraction)
