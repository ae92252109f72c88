"""Sentinels: the broker is where the master is, also when that is another."""

import asyncio
import os
import signal

import grpc
import pytest
import redis
from conftest import serving
from redis_cluster import until
from redis_sentinels import SERVICE, Guarded
from test_cluster import live
from test_failures import again, code_of, health_becomes
from world import group, world_of

from quartet_broker import scripts
from quartet_common.errors import ContractError


@pytest.fixture
def guarded(tmp_path):
    """A master, a replica, three Sentinels."""
    servers = Guarded(tmp_path)
    try:
        servers.start()
        yield servers
    finally:
        servers.kill()


async def promotion(guarded: Guarded) -> None:
    """Wait until the replica is the master."""
    replica = guarded.replica.client()
    await asyncio.to_thread(until, lambda: replica.info("replication")["role"] == "master", "the replica is promoted")


async def test_the_broker_goes_on_at_the_promoted_replica(guarded):
    async with serving(guarded.url, redis_timeout=2.0) as (stub, servicer, host):
        await live(await world_of(stub, servicer, "before"))
        world = await world_of(stub, servicer, "killed")
        await world.create()
        await world.submit(*"abcd")
        await world.open()
        leases = await world.lease()
        assert await world.redis.wait(1, 10_000) == 1, "what is acknowledged and replicated is not lost"
        guarded.master.kill()
        await health_becomes(host, "NOT_SERVING")
        assert await code_of(world.put(*map(group, leases))) == grpc.StatusCode.UNAVAILABLE
        await promotion(guarded)
        await health_becomes(host, "SERVING")
        assert await again(world.put, *map(group, leases)) == ["ACCEPTED", "ACCEPTED"]
        assert await world.batch(0) == ["a", "b"]
        # Changes are heard at the new master.
        waiting = asyncio.create_task(world.take(1, wait=20))
        await world.trained(0)
        async with asyncio.timeout(10):
            assert sorted(await world.generate(version=1)) == ["c", "d"]
            assert (await waiting)[0].granted
        assert await world.commit(1) == 2


def fails_over(guarded: Guarded) -> bool:
    """Tell a Sentinel to move the master; False: it does not see how yet."""
    try:
        guarded.sentinels[0].client().execute_command("SENTINEL", "FAILOVER", SERVICE)
    except redis.ResponseError as error:
        assert "NOGOODSLAVE" in str(error)
        return False
    return True


async def test_what_was_answered_with_a_replica_survives_a_failover(guarded):
    """The old master takes writes for a while after the replica was promoted; without WAIT they would be lost."""
    async with serving(guarded.url, redis_timeout=1.0, redis_replicas=1, sweeping=False) as (stub, servicer, _):
        world = await world_of(stub, servicer, "answered")
        await world.create()
        new, answered, enough = guarded.replica.client(), [], asyncio.Event()

        async def submit_for_ever() -> None:
            while not enough.is_set():
                await again(world.submit, f"p{len(answered)}")
                answered.append(f"p{len(answered)}")

        submitting = asyncio.create_task(submit_for_ever())
        await asyncio.to_thread(until, lambda: fails_over(guarded), "the Sentinel knows the replica well enough")
        await promotion(guarded)
        before = len(answered)
        await asyncio.to_thread(until, lambda: len(answered) > before + 10, "the broker goes on")
        enough.set()
        await submitting
        lost = [name for name in answered if not new.exists(f"q:{{answered}}:i:{name}")]
        assert not lost, f"of {len(answered)}"


async def test_an_answer_waits_for_the_replicas_that_were_asked_for(guarded):
    os.kill(guarded.sentinels[0].pid, signal.SIGSTOP)  # two of three are enough, also for those who ask it first
    async with serving(guarded.url, redis_timeout=2.0, redis_replicas=1, sweeping=False) as (stub, servicer, _):
        world = await world_of(stub, servicer, "waits")
        await live(world)
        other = await world_of(stub, servicer, "waits-not")
        await other.create()
        os.kill(guarded.replica.pid, signal.SIGSTOP)
        try:
            with pytest.raises(ContractError) as caught:
                await servicer.store.run(scripts.END_PROMPTS, "waits-not")
            assert caught.value.code == grpc.StatusCode.UNAVAILABLE
            assert "0 of 1 replicas (broker.redis_replicas) have the change" in caught.value.message
        finally:
            os.kill(guarded.replica.pid, signal.SIGCONT)
        await again(other.end_prompts)
        assert (await other.run()).prompts_ended, "doing it again is harmless"
