"""Over-sampling by `max_staleness`: a step takes the first groups that finish, and the next one gets the rest.

A run on a clock of the test's own: the broker is real, time passes only from one event to the next.
"""

import heapq
import itertools

import pytest
from world import World, group

STEPS, GROUPS = 16, 8
TRAINING = 1.0  # time that a step takes
GENERATION = (1.0, 1.0, 1.2, 1.2, 1.4, 1.6, 2.0, 4.0)  # of groups, in turn: one in eight is slow


async def run(world: World, max_staleness: int) -> tuple[float, int, int]:
    """Return the time of a step after the first ones, the groups generated in vain, the most staleness of a batch."""
    await world.create(groups_per_step=GROUPS, max_staleness=max_staleness)
    await world.open()
    await world.submit(*(f"p{n}" for n in range(1000)))
    events: list[tuple[float, int, object]] = []
    numbers, times = itertools.count(), itertools.cycle(GENERATION)
    now, step, busy, oldest, begun = 0.0, 0, False, 0, 0.0
    while step < STEPS:
        for lease in await world.lease(100, version=step):
            heapq.heappush(events, (now + next(times), next(numbers), (lease, step)))
        if not busy:
            manifest, groups = await world.take(step)
            if manifest.granted:
                busy, oldest = True, max(oldest, *(step - each.header.min_policy_version for each in groups))
                heapq.heappush(events, (now + TRAINING, next(numbers), None))
        now, _, finished = heapq.heappop(events)
        if finished is not None:
            lease, version = finished
            await world.put(group(lease, version, step))
        else:
            await world.trained(step)
            step, busy = step + 1, False
            begun = now if step == STEPS // 2 else begun
    return (now - begun) / (STEPS // 2), (await world.stats()).stale, oldest


@pytest.mark.parametrize(("max_staleness", "step", "vain"), [(0, 5.0, 0), (1, 2.05, 16), (4, 1.0, 0)])
async def test_a_step_takes_the_first_groups_and_the_next_one_the_rest(world, max_staleness, step, vain):
    """At 1 the slow groups, which take longer than two steps, are generated in vain; docs/data.md has these figures."""
    found, stale, oldest = await run(world, max_staleness)
    assert (round(found, 2), stale, oldest) == (step, vain, max_staleness)
