"""Places for items are bounded, and a run that takes all it can leaves some for others."""

import asyncio

import pytest

from quartet_reward import queue
from quartet_reward.queue import Admission


def fill(admission: Admission, run: str) -> int:
    taken = 0
    while admission.try_take(run, 1):
        taken += 1
    return taken


def test_one_run_fills_half_two_a_third_and_there_is_room_for_one_more():
    admission = Admission(1200)
    assert fill(admission, "a") == 600
    assert fill(admission, "b") == 300  # half of what is left, until the first gives back
    held_by_a, held_by_b = 600, 300
    for _ in range(600):
        admission.give("a")
        held_by_b += fill(admission, "b")
        held_by_a += fill(admission, "a") - 1
    assert abs(held_by_a - 400) <= 1 and abs(held_by_b - 400) <= 1
    assert admission.free_for("c") == admission.free >= 399  # who comes anew finds a third


def test_a_batch_takes_all_or_nothing():
    admission = Admission(100)
    assert admission.try_take_all({"a": 100}) and admission.free == 0
    admission.give("a", 100)
    assert admission.try_take_all({"a": 30, "b": 30})
    assert not admission.try_take_all({"c": 30, "a": 20})
    assert admission.free == 40 and admission.free_for("c") == 40 and admission.free_for("a") == 10
    assert 0.1 <= admission.seconds_until("a", 20) <= 30


def test_it_tells_how_long_anything_was_under_way(monkeypatch):
    clock = type("Clock", (), {"now": 50.0, "monotonic": lambda self: self.now})()
    monkeypatch.setattr(queue, "time", clock)
    admission = Admission(10)
    for seconds, take, give in ((3, "a", ""), (2, "b", ""), (1, "", "b"), (4, "", "a"), (100, "a", ""), (1, "", "a")):
        clock.now += seconds
        if take:
            admission.try_take(take, 1)
        if give:
            admission.give(give, 1)
    assert admission.busy_seconds == 2 + 1 + 4 + 1  # two at the same time are counted once


async def test_who_waits_is_let_in_in_turn_and_may_give_up():
    admission = Admission(4)
    assert fill(admission, "a") == 2 and fill(admission, "b") == 1
    first, second, other = (asyncio.create_task(admission.take(run)) for run in ("a", "a", "b"))
    await asyncio.sleep(0)
    assert not first.done()
    first.cancel()
    admission.give("a")  # before the cancelled one could say so
    await asyncio.wait_for(second, 5)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not other.done()
    admission.give("a", 2)
    other.cancel()  # let in, but gone before it could know
    with pytest.raises(asyncio.CancelledError):
        await other
    admission.give("b")
    await asyncio.wait_for(admission.wait_empty(), 5)
    assert admission.free == admission.free_for("b") == 4
