"""Redis behind TLS, with user and password: one server, and a Cluster whose nodes announce their TLS ports."""

import asyncio

import pytest
from conftest import documented_user, serving
from redis.asyncio import Redis
from redis_cluster import RedisCluster
from redis_process import free_port
from test_cluster import live
from tls import make_certificate, tls_in_front_of
from world import World

from quartet_broker.config import BrokerSection
from quartet_broker.preflight import check_redis
from quartet_common.config import ConfigError


@pytest.fixture
def certificate(tmp_path):
    """A server's TLS context; its authority is in ca.pem."""
    return make_certificate(tmp_path)


async def test_a_run_lives_behind_tls(redis_server, admin, certificate, tmp_path):
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
