"""A real Redis process for the session, and a broker on a real socket for each test."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest
from quartet.v1 import broker_pb2_grpc
from redis_process import RedisProcess
from world import World

from quartet_broker.config import BrokerSection
from quartet_broker.servicer import BrokerServicer
from quartet_broker.store import connect as connect_redis
from quartet_broker.sweeper import Sweeper
from quartet_common.channel import connect
from quartet_common.config import SecuritySection, ServerSection
from quartet_common.host import ServiceHost

_run_numbers = itertools.count()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """A Redis for all tests that do not kill it."""
    server = RedisProcess(tmp_path_factory.mktemp("redis"), "--appendfsync", "no")
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def serving(url: str, sweeping: bool = True, **settings):
    """A broker over the Redis at `url`: yields (stub, servicer, host). `sweeping`: what time does is looked for."""
    section = BrokerSection(redis_url=url, sweep_interval=settings.pop("sweep_interval", 0.2), **settings)
    client = connect_redis(section)
    host = ServiceHost("broker", "127.0.0.1:0", SecuritySection(), ServerSection(metrics=False, drain_seconds=5))
    servicer = BrokerServicer(client, section)
    broker_pb2_grpc.add_BrokerServiceServicer_to_server(servicer, host.server)
    host.on_drain(servicer.bell.close)
    host.spawn(servicer.bell.listen(), "bell")
    if sweeping:
        host.spawn(Sweeper(servicer.store, servicer.runs, host, section).run(), "sweeper")
    await host.start()
    async with asyncio.timeout(20):
        await servicer.bell.listening.wait()
    try:
        async with connect(host.address) as channel:
            yield broker_pb2_grpc.BrokerServiceStub(channel), servicer, host
    finally:
        host.stop("the test is over")
        await host.drain()
        await client.aclose()


@pytest.fixture
async def broker(redis_server):
    """(stub, servicer, host) of a broker over the session's Redis."""
    async with serving(redis_server.url) as parts:
        yield parts


@pytest.fixture
async def world(broker):
    """What a test does to a fresh run: see World."""
    stub, servicer, _ = broker
    return World(stub, servicer.store.redis, f"run-{next(_run_numbers)}")
