"""What `--dry-run` checks: Redis answers, is recent enough, and permits this user what a broker needs."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from quartet_broker import rights
from quartet_broker.config import BrokerSection, RedisUrl, parse, without_password
from quartet_broker.servers import Servers, connect
from quartet_common.config import ConfigError, LoadedConfig
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
    except NoPermissionError as error:  # of a command by which a connection begins, or INFO
        needed = re.search("'(.+?)'", str(error))
        word = f"+{needed[1]}" if needed else str(error)
        raise _refused(where, parse(section.redis_url), [word]) from error
    except (RedisError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"Redis at {where} does not answer ({error}): start it, or set broker.redis_url") from error


async def _check_all(section: BrokerSection, where: str) -> str:
    servers = connect(section)
    try:
        await _check_rights(servers, section, where)
        versions = [await _check(server, section, where) for server in await servers.all()]
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
    if (await server.info("replication"))["role"] != "master":
        log.warning("Redis at %s is a replica, which refuses writes: name its master in broker.redis_url", where)
    if "valkey_version" in info:
        return f"valkey {info['valkey_version']}"
    return version


async def _check_rights(servers: Servers, section: BrokerSection, where: str) -> None:
    commands = [*rights.COMMANDS, *([rights.WITH_REPLICAS] if section.redis_replicas else [])]
    url = parse(section.redis_url)
    if url.form == "cluster":
        commands.append(rights.IN_A_CLUSTER)
    for server in await servers.all():  # each has users of its own
        if words := await rights.missing_rights(server, commands, section.redis_timeout):
            raise _refused(where, url, words)
        if words := await rights.missing_rights(server, rights.FOR_BACKUPS, section.redis_timeout):
            log.warning("%s: only quartet backup needs them", _refused(where, url, words))


def _refused(where: str, url: RedisUrl, words: Sequence[str]) -> ConfigError:
    """Return the error about rights that are missing, with the command that grants them."""
    user = url.options.get("username") or "default"
    return ConfigError(
        f"Redis at {where} does not let the user '{user}' do all that a broker needs: "
        f"ACL SETUSER {user} {' '.join(words)} (docs/redis.md)"
    )
