"""The engine gets as many completions as its KV cache holds."""

from collections import deque

import pytest
from doubles import ScriptedEngine
from world import instance

from quartet_rollout.engines.base import EngineStats
from quartet_rollout.groups import Concurrency

LIMIT = 0.95


class CachedEngine:
    """A cache of so many tokens, and completions of a given length in it; those that do not fit wait.

    As vLLM does: what waits is taken in while the cache has room for its first token, and the newest is thrown out
    and waits again when a running one finds no room for its next.
    """

    def __init__(self, tokens: int, places: int):
        self.tokens, self.places = tokens, places
        self.running: list[list[int]] = []  # [tokens it has, tokens it will have]
        self.waiting: deque[int] = deque()
        self.thrown_out = 0
        self.finished = 0

    @property
    def used(self) -> int:
        return sum(have for have, _ in self.running)

    def step(self) -> int:
        """One token each. Returns how many ended."""
        while self.waiting and len(self.running) < self.places and self.used < self.tokens - len(self.running):
            self.running.append([0, self.waiting.popleft()])
        while self.used + len(self.running) > self.tokens:
            self.waiting.appendleft(self.running.pop()[1])
            self.thrown_out += 1
        for row in self.running:
            row[0] += 1
        ended = sum(have == end for have, end in self.running)
        self.running = [row for row in self.running if row[0] < row[1]]
        self.finished += ended
        return ended

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), len(self.waiting), self.used / self.tokens, 0)


def drive(engine: CachedEngine, concurrency: Concurrency, length: int, steps: int, group: int = 4) -> list[int]:
    """Keep the engine supplied up to the window; return the windows."""
    windows = []
    for _ in range(steps):
        window = concurrency.observe(engine.stats(), len(engine.running) + len(engine.waiting), group)
        while len(engine.running) + len(engine.waiting) + group <= window:
            engine.waiting.extend([length] * group)
        concurrency.finished(engine.step())
        windows.append(window)
    return windows


@pytest.mark.parametrize("length", [10, 50, 200])
def test_the_window_settles_near_what_the_cache_holds(length: int) -> None:
    engine = CachedEngine(tokens=4000, places=256)
    concurrency = Concurrency(256, LIMIT)
    drive(engine, concurrency, length, 4 * length)
    engine.thrown_out = engine.finished = 0
    uses = []
    for _ in range(6):
        drive(engine, concurrency, length, length)
        uses.append(engine.stats().kv_cache_use)
    # Completions of all ages have half of their length on average.
    fits = min(256, 4000 / (length / 2))
    assert 0.5 * fits <= concurrency.window <= 1.3 * fits
    careless = CachedEngine(tokens=4000, places=256)
    for _ in range(10 * length):
        while len(careless.running) + len(careless.waiting) < 256:
            careless.waiting.append(length)
        careless.step()
    assert engine.thrown_out <= 0.5 * careless.thrown_out or careless.thrown_out == 0


def test_the_window_grows_again_when_completions_become_shorter() -> None:
    engine = CachedEngine(tokens=4000, places=256)
    concurrency = Concurrency(256, LIMIT)
    long = drive(engine, concurrency, 200, 4000)[-1]
    short = drive(engine, concurrency, 25, 2000)[-1]
    assert long < 60 and short >= 5 * long


def test_an_engine_without_a_cache_to_report_gets_the_most_for_ever() -> None:
    concurrency = Concurrency(64, LIMIT)
    assert {concurrency.observe(EngineStats(8, 500, -1.0, 0), 508, 8) for _ in range(50)} == {64}


def test_the_window_is_never_smaller_than_a_group() -> None:
    concurrency = Concurrency(64, LIMIT)
    assert concurrency.observe(EngineStats(2, 62, 1.0, 0), 64, 8) == 8
    assert Concurrency(4, LIMIT).observe(EngineStats(2, 62, 1.0, 0), 64, 8) == 4


class FullEngine(ScriptedEngine):
    """Says that its cache is full as soon as more than four completions run."""

    def stats(self) -> EngineStats:
        running = min(self.running, 4)
        return EngineStats(running, self.running - running, 1.0 if self.running > 4 else 0.1, self.tokens_total)


async def test_no_more_prompts_are_leased_than_the_cache_holds(world):
    world.engine = FullEngine(step=0.005, length=20)
    world.engine.policy_version = 0
    await world.start(max_running_completions=16)
    seen = []
    await world.broker.submit(*(instance(f"{n}") for n in range(40)))
    await world.until(lambda: world.engine.running > 4)
    await world.until(lambda: world.service.groups.concurrency.window == 4)
    await world.until(lambda: world.engine.running <= 4)

    def three_more_groups() -> bool:
        seen.append(world.engine.running)
        return len(world.broker.puts) >= len(before) + 3

    before = list(world.broker.puts)
    await world.until(three_more_groups)
    assert max(seen) <= 6  # the window, and one group by which it tries to grow
