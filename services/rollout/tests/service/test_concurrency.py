"""The engine gets as many completions as its KV cache holds."""

import pytest
from doubles import ScriptedEngine
from world import instance

from quartet_rollout.concurrency import Concurrency
from quartet_rollout.engines.base import EngineStats


@pytest.mark.parametrize(("most", "use", "window"), [(64, -1.0, 64), (64, 1.0, 8), (4, 1.0, 4)])
def test_the_window_is_the_most_without_a_cache_to_report_and_never_smaller_than_a_group(most, use, window) -> None:
    assert Concurrency(most, 0.95).observe(EngineStats(2, 62, use, 0), 64, 8) == window


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


async def test_no_more_prompts_are_leased_than_may_wait_for_their_scores(world):
    world.reward.delay = 0.05
    await world.start(max_running_completions=2, max_unsettled_completions=4)
    await world.broker.submit(*(instance(f"{n}") for n in range(8)))
    seen = []

    def all_are_put() -> bool:
        seen.append(world.service.groups.unsettled)
        return len(world.broker.puts) == 8

    await world.until(all_are_put)
    assert max(seen) == 4
