"""Prompts: submission, leases, expiry, fencing, dead letters."""

import asyncio
import time

import grpc
import pytest
from conftest import on_both, serving
from quartet.v1 import broker_pb2 as pb
from world import SERVE, TRAIN, World, group, instance, refused

from quartet_broker import keys
from quartet_common.durations import to_duration
from quartet_common.errors import retry_delay


async def test_submitting_again_changes_nothing_and_other_content_is_refused(world):
    await world.create()
    first = await world.submit("a", "b")
    again = await world.submit("b", "c")
    assert (first.accepted, first.duplicates) == (2, 0)
    assert (again.accepted, again.duplicates) == (1, 1)
    await refused(
        world.stub.SubmitPrompts(
            pb.SubmitPromptsRequest(run_id=world.run_id, instances=[instance("d"), instance("a", text="2+2=?")])
        ),
        grpc.StatusCode.ALREADY_EXISTS,
        "'a'",
    )
    assert (await world.stats()).queued == 3, "all or nothing: d was not queued"


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


async def test_training_prompts_are_refused_after_their_end_but_repeats_are_not(world):
    await world.create()
    await world.submit("a")
    await world.end_prompts()
    assert (await world.submit("a")).duplicates == 1
    assert (await world.submit("s", purpose=SERVE)).accepted == 1
    await refused(world.submit("b"), grpc.StatusCode.FAILED_PRECONDITION)


async def test_only_registered_members_lease(world):
    await world.create(members=())
    await world.submit("a")
    await refused(world.lease(), grpc.StatusCode.FAILED_PRECONDITION, "register")


async def test_an_expired_lease_goes_back_and_its_holder_can_do_nothing_more(world):
    await world.create(members=("r1", "r2"))
    await world.submit("a")
    (late,) = await world.lease()
    await world.expire_leases()
    (now,) = await world.lease(holder="r2")
    assert (now.attempt, now.instance.instance_id) == (2, "a") and now.lease_id != late.lease_id
    assert await world.put(group(late)) == ["LEASE_LOST"]
    renewed = await world.stub.RenewLeases(
        pb.RenewLeasesRequest(run_id=world.run_id, lease_ids=[late.lease_id, now.lease_id])
    )
    assert list(renewed.lost) == [late.lease_id]
    assert list((await world.release(late.lease_id)).lost) == [late.lease_id]
    assert await world.put(group(now)) == ["ACCEPTED"]
    assert await world.put(group(late)) == ["DUPLICATE"]
    stats = await world.stats()
    assert (stats.redelivered, stats.duplicates, stats.ready) == (1, 1, 1)


async def test_the_sweeper_returns_expired_leases_by_itself(world):
    await world.create(prompt_lease_ttl=to_duration(0.05))
    await world.submit("a")
    await world.lease()
    began = time.monotonic()
    (lease,) = await world.lease(wait=20)
    assert lease.attempt == 2 and time.monotonic() - began < 15


async def test_a_renewed_lease_lives_on(world):
    await world.create()
    await world.submit("a")
    (lease,) = await world.lease()
    await world.redis.zadd(keys.prefix(world.run_id) + "leases", {lease.lease_id: time.time() * 1000 + 5000})
    renewed = await world.stub.RenewLeases(pb.RenewLeasesRequest(run_id=world.run_id, lease_ids=[lease.lease_id]))
    assert not renewed.lost and renewed.expires_at.ToMilliseconds() >= lease.expires_at.ToMilliseconds()
    kept = await world.redis.zscore(keys.prefix(world.run_id) + "leases", lease.lease_id)
    assert kept == renewed.expires_at.ToMilliseconds()
    assert await world.put(group(lease)) == ["ACCEPTED"]


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
    dead = await world.stub.ListDead(pb.ListDeadRequest(run_id=world.run_id))
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
    named = pb.ListDeadRequest(run_id=world.run_id, instance_ids=["c", "a", "c", "d", "never"])
    answer = await world.stub.ListDead(named)
    assert [dead.instance.instance_id for dead in answer.dead] == ["a", "c"] and answer.total == 3
    with pytest.raises(grpc.RpcError) as caught:
        await world.stub.ListDead(pb.ListDeadRequest(run_id=world.run_id, instance_ids=["a"] * 1025))
    assert caught.value.details().startswith("instance_ids: got 1025 items; allowed: 0 to 1024")


async def test_a_prompt_that_cannot_succeed_is_dead_at_once(world):
    await world.create()
    await world.submit("a")
    (lease,) = await world.lease()
    assert (await world.release(lease.lease_id, "prompt too long", permanent=True)).dead == 1
    dead = await world.stub.ListDead(pb.ListDeadRequest(run_id=world.run_id))
    assert list(dead.dead[0].reasons) == ["prompt too long"]


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


async def test_another_reason_or_a_requeue_begins_the_count_anew(world):
    await world.create(groups_per_step=64)
    await _kill(world, [f"a{n}" for n in range(19)])
    await _kill(world, ["b"], "of another reason")
    await _kill(world, [f"c{n}" for n in range(19)])
    await world.requeue_dead("a0")
    (lease,) = await world.lease()
    await world.release(lease.lease_id, "line 7 is too long", permanent=True)
    run = await world.run()
    assert (run.state, run.stats.dead_training) == (pb.RUN_STATE_ACTIVE, 39)


async def test_once_a_group_is_stored_dead_prompts_do_not_end_the_run(world):
    await world.create(groups_per_step=64)
    await world.submit("good")
    await world.roll_out()
    await _kill(world, [f"a{n}" for n in range(30)])
    run = await world.run()
    assert (run.state, run.stats.dead_training) == (pb.RUN_STATE_ACTIVE, 30)


async def test_prompts_that_die_by_expired_leases_end_the_run_as_well(redis_server, admin):
    async with serving(redis_server.url, max_first_dead=2) as (stub, _, _):
        world = World(stub, admin, f"expired-{time.time_ns()}")
        await world.create(max_deliveries=1)
        await world.submit("a", "b")
        assert len(await world.lease()) == 2
        await world.expire_leases()
        async with asyncio.timeout(20):
            async for response in stub.WatchRun(pb.WatchRunRequest(run_id=world.run_id)):
                last = response.event
        assert last.run_state.state == pb.RUN_STATE_FAILED
        assert last.run_state.reason.endswith("no group was made: the lease of r1 expired")


async def test_a_lease_call_waits_for_a_prompt_and_no_longer(world):
    await world.create()
    began = time.monotonic()
    waiting = asyncio.create_task(world.lease(wait=20))
    await asyncio.sleep(0.1)  # let it begin to wait
    await world.submit("a")
    assert len(await waiting) == 1 and time.monotonic() - began < 15
    began = time.monotonic()
    response = await world.ask(wait=0.5)
    assert not response.leases and 0.4 < time.monotonic() - began < 10
    assert response.gate == pb.GATE_REASON_NO_PROMPTS


async def test_a_wait_ends_when_the_run_does_and_later_calls_are_refused(world):
    await world.create()
    waiting = asyncio.create_task(world.ask(wait=20))
    await asyncio.sleep(0.1)  # let it begin to wait
    await world.finish()
    assert (await waiting).gate == pb.GATE_REASON_FINISHED
    await refused(world.ask(), grpc.StatusCode.FAILED_PRECONDITION)


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


async def test_puts_after_the_run_is_finished_are_told_so(world):
    await world.create()
    await world.submit("a")
    (lease,) = await world.lease()
    await world.finish()
    assert await world.put(group(lease)) == ["FINISHED"]


async def test_a_group_of_another_purpose_is_refused(world):
    await world.create()
    await world.submit("a")
    (lease,) = await world.lease()
    wrong = group(lease)
    wrong.group.header.purpose = SERVE
    await refused(world.put(wrong), grpc.StatusCode.INVALID_ARGUMENT, "groups[0].group.header.purpose")
