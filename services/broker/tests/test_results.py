"""CollectResults: transcripts back to whoever submitted."""

import grpc
import pytest
from conftest import on_both
from quartet.v1 import experience_pb2
from world import SERVE, refused

from quartet_broker import keys, scripts

pytestmark = on_both


def collect(world, *names: str):
    return world.call("CollectResults", instance_ids=names)


async def test_results_are_let_go_after_their_time(world, broker):
    _, servicer, _ = broker
    await world.create()
    await world.submit("s", purpose=SERVE)
    await world.generate()
    assert await world.redis.zadd(keys.prefix(world.run_id) + "results:SERVE", {"s": 1}, xx=True, ch=True) == 1
    await servicer.store.run(scripts.SWEEP, world.run_id)
    await refused(collect(world, "s").read(), grpc.StatusCode.NOT_FOUND, "result_ttl")


@pytest.mark.broker(max_result_bytes=100)
async def test_results_are_bounded_in_bytes_oldest_first(world):
    await world.create()
    await world.submit(*(f"s{n}" for n in range(10)), purpose=SERVE)
    await world.generate()
    (kept,) = [response async for response in collect(world, "s9")]
    assert experience_pb2.GroupTranscript.FromString(kept.transcript).instance.instance_id == "s9"
    await refused(collect(world, "s0").read(), grpc.StatusCode.NOT_FOUND)
    assert int(await world.redis.hget(keys.prefix(world.run_id) + "stats", "result_bytes:SERVE")) <= 100
