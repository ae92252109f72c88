"""What `--dry-run` checks: Redis answers, is recent enough, and permits this user what a broker needs."""

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from quartet_broker import keys
from quartet_broker.config import BrokerSection, parse, without_password
from quartet_broker.servers import Servers, connect
from quartet_broker.store import Command, Store, execute
from quartet_common.config import ConfigError, LoadedConfig
from quartet_common.errors import ContractError
from quartet_common.log import get_logger

log = get_logger(__name__)

_OLDEST_REDIS = (6, 2)


def preflight(config: LoadedConfig[BrokerSection]) -> dict[str, Any]:
    """Check that Redis answers. Raises ConfigError."""
    return {"redis": without_password(config.section.redis_url), "redis_version": check_redis(config.section)}


def check_redis(section: BrokerSection) -> str:
    """Return name and version of the configured Redis. Raises ConfigError if it does not answer or cannot be used."""
    where = without_password(section.redis_url)
    try:
        return asyncio.run(_check_all(section, where))
    except (RedisError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"Redis at {where} does not answer ({error}): start it, or set broker.redis_url") from error


async def _check_all(section: BrokerSection, where: str) -> str:
    servers = connect(section)
    try:
        versions = [await _check(server, section, where) for server in await servers.all()]
        await _check_rights(servers, section, where)
        return ", ".join(dict.fromkeys(versions))
    finally:
        await servers.aclose()


async def _check(server: Redis, section: BrokerSection, where: str) -> str:
    info = await server.info("server")
    version = info["redis_version"]
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS:
        raise ConfigError(f"Redis at {where} is version {version}: 6.2 or later is needed")
    clustered = info.get("redis_mode") == "cluster"
    if clustered != (parse(section.redis_url).form == "cluster"):
        cure = "write redis+cluster://" if clustered else "write redis://"
        description = "a node of a Cluster" if clustered else "no Cluster"
        raise ConfigError(f"Redis at {where} is {description}: {cure} in broker.redis_url")
    memory = await server.info("memory")
    if memory["maxmemory"] and memory["maxmemory_policy"] != "noeviction":
        policy = memory["maxmemory_policy"]
        log.warning("Redis at %s may evict experience: set maxmemory-policy noeviction, not %s", where, policy)
    if "valkey_version" in info:
        return f"valkey {info['valkey_version']}"
    return version


async def _check_rights(servers: Servers, section: BrokerSection, where: str) -> None:
    try:
        await Store(servers, section).run_many("list_members", "no-such-run", [()], missing_ok=True)
        server = await servers.any()
        # The commands of a put, discarded.
        put: list[Command] = [("MULTI",), ("MSET", keys.run("no-such-run"), b""), ("EVAL", "return 1", 0), ("DISCARD",)]
        for answer in await execute(server, put, section.redis_timeout):
            if isinstance(answer, NoPermissionError):
                raise answer
        async with server.pubsub() as subscription:
            await subscription.psubscribe(keys.CHANNELS)
            await subscription.parse_response()
    except NoPermissionError as error:
        description = f"does not let this user do all that a broker needs ({error}): see docs/redis.md for the ACL"
        raise ConfigError(f"Redis at {where} {description}") from error
    except ContractError as error:
        raise ConfigError(error.message) from error
