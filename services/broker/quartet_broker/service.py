"""Puts the broker together: Redis, the servicer, the subscription, the sweeper."""

import redis
from quartet.v1 import broker_pb2_grpc

from quartet_broker.config import BrokerSection, without_password
from quartet_broker.servicer import BrokerServicer
from quartet_broker.store import connect
from quartet_broker.sweeper import Sweeper
from quartet_common.config import ConfigError, LoadedConfig
from quartet_common.host import ServiceHost

_OLDEST_REDIS = (6, 2)


def check_redis(section: BrokerSection) -> str:
    """Return the version of the configured Redis. Raises ConfigError if it does not answer or is too old."""
    where = without_password(section.redis_url)
    try:
        with redis.Redis.from_url(section.redis_url, socket_timeout=section.redis_timeout) as client:
            version = client.info("server")["redis_version"]
    except (redis.RedisError, OSError, ValueError) as error:
        raise ConfigError(f"Redis at {where} does not answer ({error}): start it, or set broker.redis_url") from error
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS:
        raise ConfigError(f"Redis at {where} is version {version}: 6.2 or later is needed")
    return version


async def serve(config: LoadedConfig[BrokerSection], host: ServiceHost) -> None:
    """Serve until stopped."""
    section = config.section
    client = connect(section)
    try:
        servicer = BrokerServicer(client, section)
        broker_pb2_grpc.add_BrokerServiceServicer_to_server(servicer, host.server)
        host.capabilities.append("broker.redis")
        host.on_drain(servicer.bell.close)
        host.spawn(servicer.bell.listen(), "subscription to Redis")
        sweeper = Sweeper(servicer.store, servicer.runs, host, section.sweep_interval)
        host.spawn(sweeper.run(), "sweeper")
        await host.run()
    finally:
        await client.aclose()
