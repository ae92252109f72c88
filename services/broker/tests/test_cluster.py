"""A Redis Cluster: runs spread over its nodes, masters that fall, slots that move."""

import asyncio

import grpc
import pytest
from conftest import serving
from quartet.v1 import broker_pb2 as pb
from redis.crc import key_slot
from redis_cluster import SLOTS, RedisCluster, until
from test_backup import call
from test_failures import again, code_of, health_becomes
from world import World, group, world_of

from quartet_broker import keys, scripts
from quartet_common.errors import ContractError

MASTERS = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three masters; the first has a replica."""
    nodes = RedisCluster(tmp_path_factory.mktemp("cluster"), MASTERS, (0,), "--cluster-require-full-coverage", "no")
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.kill()


def run_at(master: int, name: str = "run") -> str:
    """A run id whose slot is the master's."""
    wanted = range(SLOTS * master // MASTERS, SLOTS * (master + 1) // MASTERS)
    return next(f"{name}-{n}" for n in range(1000) if key_slot(keys.run(f"{name}-{n}").encode()) in wanted)


async def live(world: World) -> None:
    """The life of some groups: every kind of call, to the last commit."""
    await world.create(max_staleness=1)
    await world.submit(*"abcde")
    leases = await world.lease()
    assert len(leases) == 4
    await world.release(leases[3].lease_id, "it broke", permanent=True)
    assert await world.put(*map(group, leases[:3])) == ["ACCEPTED"] * 3
    await world.open()
    assert await world.batch(0) == ["a", "b"]
    assert await world.trained(0) == 1
    assert await world.commit(1) == 2
    assert await world.requeue_dead() == 1
    assert sorted(await world.generate(version=1)) == ["d", "e"]
    assert await world.batch(1) == ["c", "d"]
    assert await world.drop(1, "c") == 1
    assert sorted(await world.batch(1)) == ["d", "e"]
    await world.trained(1)
    await world.commit(2)
    await world.finish()
    stats = await world.stats()
    assert (stats.committed, stats.dropped, stats.queued, stats.leased, stats.dead) == (4, 1, 0, 0, 0)


async def test_runs_live_at_each_node_and_are_listed_as_one(cluster, waiting):
    async with serving(cluster.url) as (stub, servicer, _), serving(cluster.url) as (other_stub, _, _):
        names = [run_at(n, "life") for n in range(MASTERS)]
        worlds = [await world_of(stub, servicer, name) for name in names]
        await asyncio.gather(*map(live, worlds))
        assert {run.spec.run_id for run in (await stub.ListRuns(pb.ListRunsRequest())).runs} >= set(names)
        for n, world in enumerate(worlds):
            node, name = cluster.client(n), world.run_id
            assert node.exists(keys.run(name)) == 1, "at the node of its slot"
            assert not await world.faults()
            assert await world.delete()
            assert not node.keys(keys.prefix(name) + "*")
            # A change wakes who waits at another broker, also where the scripts were forgotten.
            await world.create()
            prompts = asyncio.create_task(World(other_stub, None, name).lease(wait=20))
            await waiting(1)
            node.script_flush()
            async with asyncio.timeout(10):
                await world.submit("a")
                assert len(await prompts) == 1


async def test_a_backup_is_restored_into_a_cluster(cluster, tmp_path):
    async with serving(cluster.url) as (stub, servicer, _):
        world = await world_of(stub, servicer, run_at(2, "saved"))
        await world.create(max_staleness=9)
        await world.submit(*"abcde")
        assert len(await world.generate(3)) == 3
        stats = await world.stats()
        assert await call("save", world.run_id, tmp_path, cluster.url) == 0
        assert await world.delete(force=True)
        assert await call("restore", world.run_id, tmp_path, cluster.url) == 0
        assert await world.stats() == stats and not await world.faults()
        assert cluster.client(2).exists(keys.run(world.run_id)) == 1, "at the node of its slot"


async def test_a_run_whose_slot_is_moved_stands_still_and_goes_on(cluster):
    name = run_at(1, "moving")
    slot = key_slot(keys.run(name).encode())
    source, target = cluster.client(1), cluster.client(2)
    source_id, target_id = (client.execute_command("CLUSTER", "MYID") for client in (source, target))
    async with serving(cluster.url) as (stub, servicer, _):
        world = await world_of(stub, servicer, name)
        await world.create(groups_per_step=3)
        await world.submit(*"abc")
        leases = await world.lease()
        await world.open()
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        # The sweeps that come meanwhile have something to do. It needs a key that is not there yet, at the end.
        await world.redis.zadd(keys.prefix(name) + "leases", {leases[2].lease_id: 1})
        assert await code_of(world.put(*map(group, leases[:2]))) == grpc.StatusCode.UNAVAILABLE
        found = source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        # The scripts' own key last: until then every script begins at the old node.
        found.sort(key=lambda key: key == keys.run(name).encode())
        for key in found:
            source.execute_command("MIGRATE", "127.0.0.1", cluster.nodes[2].port, key, 0, 5000)
            for script, *call in ((scripts.SWEEP,), (scripts.END_PROMPTS,), (scripts.RENEW_LEASES, leases[0].lease_id)):
                with pytest.raises(ContractError) as refused:
                    await servicer.store.run(script, name, *call)
                assert refused.value.code == grpc.StatusCode.UNAVAILABLE
        assert await code_of(world.submit("d")) == grpc.StatusCode.UNAVAILABLE
        for client in (target, source):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
        assert await world.put(*map(group, leases)) == ["ACCEPTED", "ACCEPTED", "LEASE_LOST"], (
            "at the new node, at once"
        )
        assert await world.generate() == ["c"]
        assert await world.batch(0) == ["a", "b", "c"]
        assert target.hget(keys.prefix(name) + "i:c", "reasons") == b"1", "no sweep was half done"
        assert not await world.faults()


async def test_a_replica_goes_on_for_a_killed_master(cluster):
    """The last test of this Cluster: one of its masters is dead after it."""
    name, neighbor = run_at(0, "failover"), run_at(1, "failover")
    async with serving(cluster.url, redis_timeout=2.0) as (stub, servicer, host):
        world, other = await world_of(stub, servicer, name), await world_of(stub, servicer, neighbor)
        for each in (world, other):
            await each.create()
            await each.submit(*"abcd")
            await each.open()
        leases = await world.lease()
        waiting = asyncio.create_task(other.take(0, wait=30))
        # What is acknowledged and replicated is not lost: wait for the replica.
        assert await world.redis.wait(1, 10_000) == 1
        cluster.nodes[0].kill()
        await health_becomes(host, "NOT_SERVING")
        assert await code_of(world.put(*map(group, leases))) == grpc.StatusCode.UNAVAILABLE
        promoted = cluster.client(MASTERS)
        await asyncio.to_thread(
            until, lambda: promoted.info("replication")["role"] == "master", "the replica takes over"
        )
        assert await again(world.put, *map(group, leases)) == ["ACCEPTED", "ACCEPTED"], "the leases stand"
        assert await again(world.batch, 0) == ["a", "b"], "the session too"
        await health_becomes(host, "SERVING")
        assert (await again(other.ask, 4)).leases, "a run at another node"
        waiting.cancel()
        await world.trained(0)
        assert sorted(await world.generate(version=1)) == ["c", "d"]
        assert sorted(await world.batch(1)) == ["c", "d"]
