"""Many who wait at the gate: all that is let in is taken, and few of them ask."""

import asyncio
import gc

import grpc
import pytest
from quartet.v1 import broker_pb2
from world import World

ROLLOUTS = 40

pytestmark = pytest.mark.broker(sweeping=False)  # what is counted is what rollouts ask


def leasing(world: World, version: int, names: list[str]) -> list[asyncio.Task]:
    return [asyncio.create_task(world.lease(1, version, wait=20, holder=name)) for name in names]


async def scripts_called(world: World) -> int:
    return (await world.redis.info("commandstats"))["cmdstat_evalsha"]["calls"]


async def test_one_prompt_for_many_is_asked_for_by_few(world, waiting):
    names = [f"r{n}" for n in range(ROLLOUTS)]
    await world.create(members=names, groups_per_step=64, max_staleness=4)
    tasks = leasing(world, 0, names)
    await waiting(1)  # the first; the others are behind it, or come there
    before = await scripts_called(world)
    await world.submit("a")
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [lease.instance.instance_id for task in done for lease in task.result()] == ["a"]
    # All that comes is taken, however many come at a time, and by as many.
    await world.submit(*(f"b{n}" for n in range(len(left))))
    granted = [lease.instance.instance_id for leases in await asyncio.gather(*left) for lease in leases]
    assert sorted(granted) == sorted(f"b{n}" for n in range(len(left)))
    assert await scripts_called(world) - before < ROLLOUTS * 4 / 3, "whoever is granted something asks once"


async def commands_called(world: World) -> int:
    return sum(each["calls"] for each in (await world.redis.info("commandstats")).values())


async def test_a_call_costs_no_more_the_more_wait(broker, world):
    """What a script does for those that wait is done once for each, not in each call."""
    names = [f"r{n}" for n in range(ROLLOUTS)]
    await world.create(members=[*names, "other"], groups_per_step=64, max_staleness=4)
    tasks = leasing(world, 0, names)
    async with asyncio.timeout(20):
        while len(broker[1].prompts._asking[world.run_id]) < ROLLOUTS:
            await asyncio.sleep(0.01)
    await world.ask(1, version=1, holder="other")  # in another queue; Redis learns of those that wait
    before = await commands_called(world)
    for _ in range(10):
        await world.ask(1, version=1, holder="other")
    assert await commands_called(world) - before < 10 * ROLLOUTS, "each call has a command for each that waits"
    await world.submit(*names)
    await asyncio.gather(*tasks)


async def test_one_with_older_weights_does_not_keep_others_out(world, waiting):
    """The gate is shut for the older weights and open for the newer: each is asked for."""
    names = ["old-1", "old-2", "new-1", "new-2", "r1"]
    await world.create(members=names, groups_per_step=2, max_staleness=0)
    await world.open()
    await world.submit("a", "b", "c", "d")
    assert len(await world.generate(2)) == 2
    old = leasing(world, 0, names[:2])
    await waiting(1)
    await world.batch(0)
    new = leasing(world, 1, names[2:4])
    await waiting(2)
    await world.trained(0)
    granted = [lease.instance.instance_id for leases in await asyncio.gather(*new) for lease in leases]
    assert sorted(granted) == ["c", "d"]
    for task in old:
        task.cancel()
    await asyncio.gather(*old, return_exceptions=True)


async def test_calls_for_runs_that_there_are_not_leave_nothing_behind(broker):
    stub, servicer, _ = broker
    for n in range(20):
        with pytest.raises(grpc.RpcError) as refused:
            await stub.GetEvaluation(broker_pb2.GetEvaluationRequest(run_id=f"none-{n}", evaluation_id="set@0"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    gc.collect()
    assert len(servicer.notifier._waiters) <= 1, "the last call may be on its way out"
