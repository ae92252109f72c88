"""Runs share by what they use: no flood starves another run, nobody's slot is lost, and places are bounded."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from quartet_reward.queue import FairQueue
from quartet_server.fair_queue import Admission


class Bench:
    """A queue, and tasks that take their run's usual time by a made-up clock."""

    def __init__(self, slots: int = 1):
        self.now = 0.0
        self.queue: FairQueue[int] = FairQueue("test", lambda: self.now)
        self.held = []
        self.tasks: list[asyncio.Task] = []
        for slot in range(slots):
            self.queue.add(slot)

    async def wait_for_turn(self, run: str) -> None:
        self.held.append(await self.queue.acquire(run))

    def arrive(self, run: str, count: int = 1) -> None:
        self.tasks += [asyncio.create_task(self.wait_for_turn(run)) for _ in range(count)]

    async def work(self, seconds: dict[str, float], turns: int) -> list[str]:
        """Let `turns` tasks come to their end; return whose turns they were."""
        ended = []
        for _ in range(turns):
            await asyncio.sleep(0)
            grant = self.held.pop(0)
            self.now += seconds[grant.run]
            ended.append(grant.run)
            self.queue.release(grant)
            await asyncio.sleep(0)
        return ended


@pytest.fixture
async def bench(request):
    """A bench of so many slots; its tasks have ended after the test."""
    made = Bench(getattr(request, "param", 1))
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_a_flood_of_one_run_does_not_delay_another(bench):
    bench.arrive("flood", 500)
    await bench.work({"flood": 1.0}, 5)
    bench.arrive("small", 3)
    ended = await bench.work({"flood": 1.0, "small": 1.0}, 7)
    assert ended.count("small") == 3
    assert ended[0] == "flood" and ended[1] == "small"  # the one that runs is not taken away


@pytest.mark.parametrize(
    ("bench", "arrivals", "seconds", "turns", "run", "least", "most"),
    [
        (1, {"slow": 100, "quick": 400}, {"slow": 10.0, "quick": 1.0}, 220, "slow", 15, 25),  # time and not turns
        *((2, {"a": 300, "b": 50, "c": 100}, dict.fromkeys("abc", 1.0), 120, run, 38, 42) for run in "abc"),
    ],
    indirect=["bench"],
)
async def test_runs_share_time_whatever_they_ask_for(bench, arrivals, seconds, turns, run, least, most):
    for name, count in arrivals.items():
        bench.arrive(name, count)
    assert least <= (await bench.work(seconds, turns)).count(run) <= most


async def test_who_comes_back_has_no_credit_for_the_time_it_was_away(bench):
    bench.arrive("steady", 300)
    await bench.work({"steady": 1.0}, 100)
    bench.arrive("new", 100)
    assert 19 <= (await bench.work({"steady": 1.0, "new": 1.0}, 40)).count("new") <= 21


async def test_who_gives_up_takes_nothing_along():
    queue: FairQueue[str] = FairQueue("test")
    gone, stays = (asyncio.create_task(queue.acquire("run")) for _ in range(2))
    await asyncio.sleep(0)
    assert queue.waiting == 2
    gone.cancel()
    queue.add("slot")  # before the cancelled task could say so
    grant = await stays
    assert grant.resource == "slot"
    assert (queue.waiting, queue.running) == (0, 1)
    late = asyncio.create_task(queue.acquire("other"))
    await asyncio.sleep(0)
    queue.release(grant)
    late.cancel()  # after it was granted, before it could know
    with pytest.raises(asyncio.CancelledError):
        await late
    assert (await queue.acquire("third", timeout=5)).resource == "slot"
    with pytest.raises(TimeoutError):
        await queue.acquire("fourth", timeout=0.01)
    assert (queue.waiting, queue.running) == (0, 1)


async def test_two_at_once_or_none_and_nobody_slips_by():
    queue: FairQueue[int] = FairQueue("test")
    queue.add(1, 2)
    one = await queue.acquire("a")
    pair = asyncio.create_task(queue.acquire("b", count=2))
    await asyncio.sleep(0)
    single = asyncio.create_task(queue.acquire("b"))
    await asyncio.sleep(0)
    assert not pair.done() and not single.done()  # else many singles would keep a pair waiting for ever
    queue.release(one)
    assert sorted((await pair).resources) == [1, 2] and not single.done()
    other = asyncio.create_task(queue.acquire("c", count=2))
    await asyncio.sleep(0)
    queue.release(pair.result())
    assert len((await other).resources) == 2  # b has had its turn
    queue.release(other.result())
    assert len((await single).resources) == 1


def fill(admission: Admission, run: str) -> int:
    taken = 0
    while admission.try_acquire(run, 1):
        taken += 1
    return taken


def test_one_run_fills_half_two_a_third_and_there_is_room_for_one_more():
    admission = Admission(1200)
    assert fill(admission, "a") == 600
    assert fill(admission, "b") == 300  # half of what is left, until the first gives back
    held_by_a, held_by_b = 600, 300
    for _ in range(600):
        admission.release("a")
        held_by_b += fill(admission, "b")
        held_by_a += fill(admission, "a") - 1
    assert abs(held_by_a - 400) <= 1 and abs(held_by_b - 400) <= 1
    assert admission.free_for("c") == admission.free >= 399  # who comes anew finds a third


async def test_who_waits_is_let_in_in_turn_and_may_give_up():
    admission = Admission(4)
    assert fill(admission, "a") == 2 and fill(admission, "b") == 1
    first, second = (asyncio.create_task(admission.acquire("a")) for _ in range(2))
    await asyncio.sleep(0)
    assert not first.done()
    first.cancel()
    admission.release("a")  # before the cancelled one could say so
    await asyncio.wait_for(second, 5)
    with pytest.raises(asyncio.CancelledError):
        await first
    other = asyncio.create_task(admission.acquire("b"))
    await asyncio.sleep(0)
    assert not other.done()
    admission.release("a", 2)
    other.cancel()  # let in, but gone before it could know
    with pytest.raises(asyncio.CancelledError):
        await other
    admission.release("b")
    gave_up = AsyncMock()
    await admission.drain(5, gave_up)
    gave_up.assert_not_called()
    assert admission.free == admission.free_for("b") == 4


async def test_a_new_run_is_served_where_as_many_runs_wait_as_are_remembered(monkeypatch):
    monkeypatch.setattr("quartet_server.fair_queue._MOST_RUNS", 2)
    queue: FairQueue[int] = FairQueue("test")
    tasks = [asyncio.create_task(queue.acquire(run, timeout=5)) for run in "abc"]
    await asyncio.sleep(0)
    queue.add(1, 2, 3)
    assert [grant.run for grant in await asyncio.gather(*tasks)] == ["a", "b", "c"]
