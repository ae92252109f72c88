"""CollectResults: transcripts back to whoever submitted."""

import asyncio

import grpc
from conftest import on_both, serving
from quartet.v1 import experience_pb2
from world import SERVE, refused, world_of

from quartet_common.durations import to_duration

pytestmark = on_both


def collect(world, *names: str):
    return world.call("CollectResults", instance_ids=names)


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
        world = await world_of(stub, servicer, "bounded-results")
        await world.create()
        await world.submit(*(f"s{n}" for n in range(10)), purpose=SERVE)
        await world.roll_out()
        (kept,) = [response async for response in collect(world, "s9")]
        assert experience_pb2.GroupTranscript.FromString(kept.transcript).instance.instance_id == "s9"
        await refused(collect(world, "s0").read(), grpc.StatusCode.NOT_FOUND)
        assert int(await world.redis.hget("q:{bounded-results}:stats", "result_bytes:SERVE")) <= 100
