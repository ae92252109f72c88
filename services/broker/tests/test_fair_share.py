"""One rollout does not take the whole admission limit while others ask; alone it may."""

import asyncio

import pytest
from conftest import on_both
from prometheus_client import REGISTRY
from quartet.v1 import broker_pb2 as pb
from test_audit import audit
from world import World, group

STEP, LIMIT = 4, 20  # groups of a step, and of the admission limit
LONG = 20  # seconds to wait for prompts: longer than a test

pytestmark = pytest.mark.broker(sweeping=False)


async def begin(world: World, *members: str) -> None:
    await world.create(members=members, groups_per_step=STEP, max_staleness=LIMIT // STEP - 1)
    await world.open()
    await world.submit(*(f"p{n}" for n in range(400)))


@on_both
async def test_one_that_asks_alone_takes_all_and_nothing_more_while_another_asks(world, waiting):
    await begin(world, "slow", "quick")
    held = await world.lease(100, holder="slow")
    assert len(held) == LIMIT
    quick = asyncio.create_task(world.lease(3, holder="quick", wait=LONG))
    await waiting(1)
    await world.release(held.pop().lease_id)
    assert len(await quick) == 1, "what is given back goes to the one that waits"
    await world.release(held.pop().lease_id)
    answer = await world.ask(100, holder="slow")
    assert not answer.leases and answer.gate == pb.GATE_REASON_SHARE
    assert REGISTRY.get_sample_value("quartet_broker_shares_reached_total", {"run": world.run_id}) == 1
    assert list((await audit(world))[1].faults) == []

    # What is put or given back is held no more. Of 1 + 1 + 7 groups each may hold 5: below that it gets prompts again.
    await world.put(*(group(lease) for lease in held[:11]))
    for lease in held[12:]:
        await world.release(lease.lease_id)
    assert len(await world.lease(100, holder="slow")) == 4
    summary = (await audit(world))[1]
    assert list(summary.faults) == [] and summary.recounted.leased == 6


async def test_a_lease_that_counts_for_another_member_is_found_by_the_audit(world):
    await begin(world, "holder", "other")
    (lease,) = await world.lease(1, holder="holder")
    await world.redis.zadd(f"q:{{{world.run_id}}}:held:other", {lease.lease_id: 0, "ended:p9": 0})
    faults = list((await audit(world))[1].faults)
    assert faults == [f"the lease {lease.lease_id} of holder counts toward the share of other"]


async def test_one_of_three_that_ask_gets_a_third(world):
    await begin(world, "a", "b", "c")
    for name in "abc":
        assert await world.lease(1, holder=name, wait=LONG)
    assert len(await world.lease(100, holder="a")) == 6, "of 20, with what it holds"
    assert len(await world.lease(100, holder="a")) == 0 and len(await world.lease(100, holder="b")) == 6
    assert len(await world.lease(100, holder="c")) == 5, "the rest"


async def test_one_that_has_left_asks_no_more(world):
    await begin(world, "gone", "left")
    assert len(await world.lease(3, holder="gone", wait=LONG)) == 3
    assert await world.leave("gone")
    assert len(await world.lease(100, holder="left")) == LIMIT - 3


async def test_an_expired_lease_is_held_no_more(world):
    await begin(world, "stopped", "other")
    held = await world.lease(100, holder="stopped")
    assert len(held) == LIMIT
    await world.expire_leases()
    assert len(await world.lease(100, holder="stopped")) == LIMIT, "alone, with new leases"


@pytest.mark.parametrize("others", [1, 3])
async def test_what_hoards_and_never_finishes_leaves_the_others_their_part(broker, world, others):
    """The hoarder asks for all that it can get and finishes nothing; the run goes on by what the others make."""
    names = [f"quick-{n}" for n in range(others)]
    await world.create(members=["hoarder", *names], groups_per_step=STEP, max_staleness=LIMIT // STEP - 1)
    await world.open()
    hoarded, step, made = 0, 0, dict.fromkeys(names, 0)

    async def hoard() -> None:
        nonlocal hoarded
        while True:
            hoarded += len(await world.lease(1000, step, holder="hoarder", wait=0.5))

    async def work(name: str) -> None:
        while True:
            if leases := await world.lease(2, step, holder=name, wait=0.5):
                await world.put(*(group(lease, step) for lease in leases))
                made[name] += len(leases)

    tasks = [asyncio.create_task(hoard()), *(asyncio.create_task(work(name)) for name in names)]
    async with asyncio.timeout(60):
        while len(broker[1].prompts._asking[world.run_id]) <= others:  # all ask before there is anything to have
            await asyncio.sleep(0.01)
        await world.submit(*(f"p{n}" for n in range(400)))
        for step in range(30):
            while not (await world.take(step, wait=5))[0].granted:
                assert not any(task.done() for task in tasks)
            await world.trained(step)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert 0 < hoarded <= LIMIT * 3 / 4 and min(made.values()) > 0, (hoarded, made)
    assert list((await audit(world))[1].faults) == []
