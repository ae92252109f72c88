"""The room is bounded, and a run that floods it leaves place for others."""

import asyncio

import pytest

from quartet_reward import admission as room_module
from quartet_reward.admission import Room


def fill(room: Room, run: str) -> int:
    taken = 0
    while room.try_take(run, 1):
        taken += 1
    return taken


def test_one_run_fills_half_two_a_third_and_there_is_room_for_one_more():
    room = Room(1200)
    assert fill(room, "a") == 600
    assert fill(room, "b") == 300  # half of what is left, until the first gives back
    held_by_a, held_by_b = 600, 300
    for _ in range(600):
        room.give("a")
        held_by_b += fill(room, "b")
        held_by_a += fill(room, "a") - 1
    assert abs(held_by_a - 400) <= 1 and abs(held_by_b - 400) <= 1
    assert room.free_for("c") == room.free >= 399  # who comes anew finds a third


def test_a_batch_takes_all_or_nothing():
    room = Room(100)
    assert room.try_take_all({"a": 100}) and room.free == 0
    room.give("a", 100)
    assert room.try_take_all({"a": 30, "b": 30})
    assert not room.try_take_all({"c": 30, "a": 20})
    assert room.free == 40 and room.free_for("c") == 40 and room.free_for("a") == 10
    assert 0.1 <= room.seconds_until("a", 20) <= 30


def test_it_tells_how_long_anything_was_under_way(monkeypatch):
    clock = type("Clock", (), {"now": 50.0, "monotonic": lambda self: self.now})()
    monkeypatch.setattr(room_module, "time", clock)
    room = Room(10)
    for seconds, take, give in ((3, "a", ""), (2, "b", ""), (1, "", "b"), (4, "", "a"), (100, "a", ""), (1, "", "a")):
        clock.now += seconds
        if take:
            room.try_take(take, 1)
        if give:
            room.give(give, 1)
    assert room.busy_seconds == 2 + 1 + 4 + 1  # two at the same time are counted once


async def test_who_waits_is_let_in_in_turn_and_may_give_up():
    room = Room(4)
    assert fill(room, "a") == 2 and fill(room, "b") == 1
    first, second, other = (asyncio.create_task(room.take(run)) for run in ("a", "a", "b"))
    await asyncio.sleep(0)
    assert not first.done()
    first.cancel()
    room.give("a")  # before the cancelled one could say so
    await asyncio.wait_for(second, 5)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not other.done()
    room.give("a", 2)
    other.cancel()  # let in, but gone before it could know
    with pytest.raises(asyncio.CancelledError):
        await other
    room.give("b")
    await asyncio.wait_for(room.wait_empty(), 5)
    assert room.free == room.free_for("b") == 4
