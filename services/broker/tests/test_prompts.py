"""Prompts: submission, leases, expiry, fencing, dead letters."""

import asyncio
import time

import grpc
import pytest
from conftest import on_both, serving
from quartet.v1 import broker_pb2 as pb
from world import SERVE, TRAIN, World, group, instance, refused

from quartet_common.durations import to_duration
from quartet_common.errors import retry_delay


async def test_a_committed_instance_is_still_known(world):
    await world.create(groups_per_step=1)
    await world.submit("a")
    await world.roll_out()
    await world.open()
    await world.train(0)
    await world.commit(1)
    assert (await world.submit("a")).duplicates == 1
    await refused(world.submit("a", data_pass=1), grpc.StatusCode.ALREADY_EXISTS)


async def test_a_full_queue_asks_to_retry_later(world):
    await world.create(max_queued_prompts=3)
    await world.submit("a", "b")
    with pytest.raises(grpc.RpcError) as caught:
        await world.submit("c", "d")
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay(caught.value) == 1.0
    assert (await world.submit("c")).accepted == 1
    await refused(world.submit("e", "f", "g", "h"), grpc.StatusCode.INVALID_ARGUMENT)  # it can never fit


async def test_an_expired_lease_goes_back_and_its_holder_can_do_nothing_more(world):
    await world.create(members=("r1", "r2"))
    await world.submit("a")
    (late,) = await world.lease()
    await refused(world.lease(holder="r3"), grpc.StatusCode.FAILED_PRECONDITION, "register")
    await world.expire_leases()
    (now,) = await world.lease(holder="r2")
    assert (now.attempt, now.instance.instance_id) == (2, "a") and now.lease_id != late.lease_id
    assert await world.put(group(late)) == ["LEASE_LOST"]
    renewed = await world.renew(late.lease_id, now.lease_id)
    assert list(renewed.lost) == [late.lease_id]
    assert renewed.expires_at.ToMilliseconds() >= now.expires_at.ToMilliseconds()
    assert list((await world.release(late.lease_id)).lost) == [late.lease_id]
    assert await world.put(group(now)) == ["ACCEPTED"]
    assert await world.put(group(late)) == ["DUPLICATE"]
    stats = await world.stats()
    assert (stats.redelivered, stats.duplicates, stats.ready) == (1, 1, 1)


async def test_the_sweeper_returns_expired_leases_by_itself(world):
    await world.create(prompt_lease_ttl=to_duration(0.05))
    await world.submit("a")
    await world.lease()
    async with asyncio.timeout(15):
        (lease,) = await world.lease(wait=20)
    assert lease.attempt == 2


async def test_a_drained_prompt_goes_back_uncounted_a_failed_one_counted(world):
    await world.create(max_deliveries=2)
    await world.submit("a")
    for _ in range(3):
        (lease,) = await world.lease()
        assert lease.attempt == 1
        assert (await world.release(lease.lease_id)).requeued == 1
    (lease,) = await world.lease()
    assert (await world.release(lease.lease_id, "verifier crashed")).requeued == 1
    (lease,) = await world.lease()
    assert lease.attempt == 2


@on_both
async def test_a_prompt_that_fails_too_often_is_set_aside_with_its_reasons(world):
    await world.create(max_deliveries=3)
    await world.submit("a")
    for failure in ("crashed", "", "timed out"):
        (lease,) = await world.lease()
        if failure:
            await world.release(lease.lease_id, failure)
        else:
            await world.expire_leases()
    assert await world.state_of("a") == "DEAD"
    assert not await world.lease()
    dead = await world.call("ListDead")
    assert dead.total == 1 and dead.dead[0].attempts == 3
    assert dead.dead[0].instance == instance("a")
    assert list(dead.dead[0].reasons) == ["crashed", "the lease of r1 expired", "timed out"]

    assert await world.requeue_dead() == 1
    (lease,) = await world.lease()
    assert lease.attempt == 1
    assert await world.put(group(lease)) == ["ACCEPTED"]
    assert (await world.stats()).dead == 0


async def test_dead_prompts_can_be_asked_for_by_name(world):
    await world.create(max_staleness=9)
    await world.submit(*"abcd")
    for lease in await world.lease(3):
        await world.release(lease.lease_id, f"no {lease.instance.instance_id}", permanent=True)
    answer = await world.call("ListDead", instance_ids=["c", "a", "c", "d", "never"])
    assert [dead.instance.instance_id for dead in answer.dead] == ["a", "c"] and answer.total == 3
    with pytest.raises(grpc.RpcError) as caught:
        await world.call("ListDead", instance_ids=["a"] * 1025)
    assert caught.value.details().startswith("instance_ids: got 1025 items; allowed: 0 to 1024")


async def _kill(world, names: list[str], reason: str = "line {} is too long", purpose: int = TRAIN) -> None:
    await world.submit(*names, purpose=purpose)
    for n, lease in enumerate(await world.lease()):
        await world.release(lease.lease_id, reason.format(n), permanent=True)


async def test_the_first_twenty_prompts_that_die_of_one_reason_end_the_run(world):
    await world.create(groups_per_step=64)
    await _kill(world, [f"s{n}" for n in range(20)], purpose=SERVE)
    await _kill(world, [f"a{n}" for n in range(19)])
    assert (await world.run()).state == pb.RUN_STATE_ACTIVE
    await _kill(world, ["last"])
    run = await world.run()
    assert (run.state, run.ending) == (pb.RUN_STATE_FAILED, pb.RUN_ENDING_DEAD_PROMPTS)
    assert run.reason == "the first 20 prompts died of one reason, and no group was made: line 0 is too long"
    assert (run.stats.dead, run.stats.dead_training) == (40, 20)


async def test_another_reason_or_a_requeue_begins_the_count_anew_and_a_stored_group_ends_it(world):
    await world.create(groups_per_step=64)
    await _kill(world, [f"a{n}" for n in range(19)])
    await _kill(world, ["b"], "of another reason")
    await _kill(world, [f"c{n}" for n in range(19)])
    await world.requeue_dead("a0")
    (lease,) = await world.lease()
    await world.release(lease.lease_id, "line 7 is too long", permanent=True)
    await world.submit("good")
    await world.roll_out()
    await _kill(world, [f"d{n}" for n in range(21)])
    run = await world.run()
    assert (run.state, run.stats.dead_training) == (pb.RUN_STATE_ACTIVE, 60)


async def test_prompts_that_die_by_expired_leases_end_the_run_as_well(redis_server, admin):
    async with serving(redis_server.url, max_first_dead=2) as (stub, _, _):
        world = World(stub, admin, f"expired-{time.time_ns()}")
        await world.create(max_deliveries=1)
        await world.submit("a", "b")
        assert len(await world.lease()) == 2
        await world.expire_leases()
        async with asyncio.timeout(20):
            async for response in world.call("WatchRun"):
                last = response.event
        assert last.run_state.state == pb.RUN_STATE_FAILED
        assert last.run_state.reason.endswith("no group was made: the lease of r1 expired")


async def test_serving_prompts_come_first_and_are_answered_not_trained(world):
    await world.create(groups_per_step=1)
    await world.submit("a", "b")
    await world.submit("s", purpose=SERVE)
    leases = await world.lease()
    assert [lease.instance.instance_id for lease in leases] == ["s", "a"], "the gate of 1 group holds b back"
    assert await world.put(*map(group, leases)) == ["ACCEPTED", "ACCEPTED"]
    assert await world.state_of("s") == "DELIVERED"
    await world.open()
    assert await world.batch(0) == ["a"]
    assert leases[1].instance.purpose == TRAIN
