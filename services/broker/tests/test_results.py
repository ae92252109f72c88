"""CollectResults: transcripts back to whoever submitted."""

import asyncio

import grpc
import pytest
from conftest import on_both, serving
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2
from world import SERVE, World, group, refused

from quartet_common.durations import to_duration

pytestmark = on_both


def collect(world, *names: str):
    return world.stub.CollectResults(pb.CollectResultsRequest(run_id=world.run_id, instance_ids=names), timeout=30)


def said(response: pb.CollectResultsResponse) -> str:
    transcript = experience_pb2.GroupTranscript.FromString(response.transcript)
    return transcript.instance.instance_id


async def test_results_come_in_order_of_completion_each_once(world):
    await world.create(groups_per_step=4)
    await world.submit("s1", "s2", purpose=SERVE)
    await world.submit("a", "b")
    leases = {lease.instance.instance_id: lease for lease in await world.lease()}
    await world.put(group(leases["b"]))
    call = collect(world, "s1", "s2", "a", "b", "b")
    assert said(await call.read()) == "b"
    await world.put(group(leases["s2"]))
    assert said(await call.read()) == "s2"
    await world.put(group(leases["a"]))
    assert said(await call.read()) == "a"
    await world.release(leases["s1"].lease_id, "bad reference", permanent=True)
    last = await call.read()
    assert last.instance_id == "s1" and list(last.dead.reasons) == ["bad reference"]
    assert await call.read() == grpc.aio.EOF
    again = {response.instance_id async for response in collect(world, "s1", "s2", "a", "b")}
    assert again == {"s1", "s2", "a", "b"}, "they wait to be collected again"


async def test_results_of_trained_groups_outlive_their_commit(world):
    await world.create(groups_per_step=1)
    await world.submit("a")
    await world.open()
    await world.roll_out()
    await world.train(0)
    await world.commit(1)
    assert [said(response) async for response in collect(world, "a")] == ["a"]


async def test_results_are_let_go_after_their_time(world):
    await world.create(result_ttl=to_duration(0.2))
    await world.submit("s", purpose=SERVE)
    await world.roll_out()
    async with asyncio.timeout(20):
        while await world.redis.exists(f"q:{{{world.run_id}}}:result:s"):
            await asyncio.sleep(0.1)  # the sweeper lets it go
    await refused(collect(world, "s").read(), grpc.StatusCode.NOT_FOUND, "result_ttl")


async def test_results_are_bounded_in_bytes_oldest_first(redis_server):
    async with serving(redis_server.url, max_result_bytes=100) as (stub, servicer, _):
        world = World(stub, servicer.store.redis, "bounded-results")
        await world.create()
        await world.submit(*(f"s{n}" for n in range(10)), purpose=SERVE)
        await world.roll_out()
        assert [said(response) async for response in collect(world, "s9")] == ["s9"]
        with pytest.raises(grpc.RpcError):
            await collect(world, "s0").read()
        assert int(await world.redis.hget("q:{bounded-results}:stats", "result_bytes:SERVE")) <= 100


async def test_collecting_ends_with_the_run(world):
    await world.create()
    await world.submit("s", purpose=SERVE)
    call = collect(world, "s")
    reading = asyncio.ensure_future(call.read())
    await asyncio.sleep(0.1)  # let it begin to wait
    await world.finish()
    await refused(reading, grpc.StatusCode.FAILED_PRECONDITION)


async def test_an_unknown_instance_is_named(world):
    await world.create()
    await refused(collect(world, "nobody").read(), grpc.StatusCode.NOT_FOUND, "'nobody'")
