"""Sentinels: the broker is where the master is, also when that is another."""

import asyncio
import os
import signal

import grpc
import pytest
from conftest import serving
from redis_cluster import until
from redis_sentinels import Guarded
from test_cluster import live
from test_failures import again, code_of, health_becomes
from world import group, world_of

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
        replica = guarded.replica.client()
        await asyncio.to_thread(until, lambda: replica.info("replication")["role"] == "master", "it is promoted")
        await health_becomes(host, "SERVING")
        assert await again(world.put, *map(group, leases)) == ["ACCEPTED", "ACCEPTED"]
        # Changes are heard at the new master.
        waiting = asyncio.create_task(world.take(1, wait=20))
        assert await world.batch(0) == ["a", "b"]
        await world.trained(0)
        async with asyncio.timeout(10):
            assert sorted(await world.roll_out(version=1)) == ["c", "d"]
            assert (await waiting)[0].granted
        assert await world.commit(1) == 2


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
                await servicer.store.run("end_prompts", "waits-not")
            assert caught.value.code == grpc.StatusCode.UNAVAILABLE
            assert "0 of 1 replicas (broker.redis_replicas) have the change" in caught.value.message
        finally:
            os.kill(guarded.replica.pid, signal.SIGCONT)
        await again(other.end_prompts)
        assert (await other.run()).prompts_ended, "doing it again is harmless"
