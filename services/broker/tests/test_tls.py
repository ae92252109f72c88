"""Redis behind TLS, with user and password: one server, and a Cluster whose nodes announce their TLS ports.

The servers in the wheels are built without TLS: a proxy takes it and hands on plaintext.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import pytest
from conftest import documented_user, serving
from redis.asyncio import Redis
from redis_cluster import RedisCluster
from redis_process import free_port
from test_cluster import live
from world import World

from quartet_broker.config import BrokerSection
from quartet_broker.preflight import check_redis
from quartet_client.authority import create_authority, issue
from quartet_common.config import ConfigError


@pytest.fixture
def certificate(tmp_path):
    """A server's TLS context, for 127.0.0.1; its authority is in ca.pem."""
    create_authority(tmp_path)
    issue(tmp_path, "redis", ["broker"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "redis.pem", tmp_path / "redis-key.pem")
    return context


@contextlib.asynccontextmanager
async def tls_in_front_of(port: int, context: ssl.SSLContext, own_port: int = 0) -> AsyncIterator[int]:
    """Listen with TLS at a port of the loopback (yielded), and pass everything on to another."""
    writers: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, other_writer))
        await asyncio.gather(pass_on(reader, other_writer), pass_on(other_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", own_port, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def test_run_completes_over_tls(redis_server, admin, certificate, tmp_path):
    async with tls_in_front_of(redis_server.port, certificate) as port:
        url = f"rediss://quartet:SECRET@127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'ca.pem'}"
        async with serving(url) as (stub, _, _):
            await live(World(stub, admin, f"tls-{redis_server.port}"))


async def test_a_certificate_of_nobody_is_refused(redis_server, certificate):
    async with tls_in_front_of(redis_server.port, certificate) as port:
        section = BrokerSection(redis_url=f"rediss://quartet:SECRET@127.0.0.1:{port}/0", redis_timeout=5)
        with pytest.raises(ConfigError) as refused:
            await asyncio.to_thread(check_redis, section)
        assert "certificate" in str(refused.value).lower() and "SECRET" not in str(refused.value)


async def test_a_cluster_lives_behind_tls_with_a_user(certificate, tmp_path):
    announced = free_port()
    cluster = RedisCluster(tmp_path, 1, (), "--cluster-announce-port", str(announced))
    try:
        cluster.start()
        node = cluster.nodes[0]
        with cluster.client(0) as client:
            client.execute_command("ACL", "SETUSER", *documented_user())
        async with tls_in_front_of(node.port, certificate, announced):
            url = f"rediss+cluster://quartet:SECRET@127.0.0.1:{announced}?ssl_ca_certs={tmp_path / 'ca.pem'}"
            assert await asyncio.to_thread(check_redis, BrokerSection(redis_url=url))
            async with serving(url) as (stub, _, _), Redis(port=node.port) as admin:
                await live(World(stub, admin, "tls"))
    finally:
        cluster.kill()
