"""What comes again is shown once a minute, with its count."""

from quartet_common.text import Repeats, without_numbers


def test_what_comes_again_is_shown_once_a_minute_with_its_count():
    now = 0.0
    repeats = Repeats(60, clock=lambda: now)
    died = without_numbers("prompt 12 of 400 died")
    assert [repeats.count(without_numbers(f"prompt {n} of 400 died")) for n in range(400)] == [0] + 399 * [None]
    assert repeats.count("the broker is away") == 0, "another is shown at once"
    assert list(repeats.left()) == [(died, 399)]
    now = 59.0
    assert repeats.count(died) is None
    now = 60.0
    assert repeats.count(died) == 400
    assert repeats.count(died) is None
    assert list(repeats.left()) == [(died, 1)]


def test_who_sends_many_kinds_takes_no_more_memory():
    repeats = Repeats()
    for n in range(5000):
        assert repeats.count(("caller", n)) == 0
    assert repeats.count(("caller", 4999)) is None
    assert repeats.count(("caller", 0)) == 0, "forgotten, and shown again"
