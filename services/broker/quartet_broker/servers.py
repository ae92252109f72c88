"""Finds the Redis server of a key: the only one, the master that Sentinels name, or a node of a Cluster.

redis-py's Sentinel and RedisCluster discover the servers; calls go over blocking connection pools. The addresses are
cached and go stale when a master fails or a slot moves. Nothing is retried here: the call that fails gets UNAVAILABLE,
the cache is invalidated, and the next call discovers the servers again.
"""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisClusterException, RedisError, SlotNotCoveredError
from redis.maint_notifications import MaintNotificationsConfig

from quartet_broker.config import Address, BrokerSection, parse
from quartet_common.log import get_logger


class _OnUvloop(AbstractConnection):
    """A connection whose peer has reset it raises ConnectionError when it sends.

    redis-py handles OSError, which asyncio's transports raise; a closed transport of uvloop raises RuntimeError
    (`UVHandle._ensure_alive` in uvloop/handles/handle.pyx).
    """

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:
            if "closed" not in str(error):
                raise
            raise RedisConnectionError("the server reset the connection") from error


CONNECTIONS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    kind: type(kind.__name__, (_OnUvloop, kind), {}) for kind in (Connection, SSLConnection, UnixDomainSocketConnection)
}
"""The replacement for each connection class of redis-py."""


log = get_logger(__name__)

Key = str | bytes | int | float

# The shortest interval between discoveries: during a failover every call fails, and each would start one.
_DISCOVERY_INTERVAL = 0.1
# Timeout of one Sentinel or Cluster node: they are queried in turn, and one that hangs delays all calls.
_QUERY_SECONDS = 1.0


def connect(section: BrokerSection) -> "Servers":
    """Return the servers of `broker.redis_url`, not connected yet."""
    forms: dict[str, type[Single | Sentinels | Cluster]] = {"single": Single, "sentinel": Sentinels, "cluster": Cluster}
    return forms[parse(section.redis_url).form](section)


def _client(section: BrokerSection, options: dict[str, Any], address: Address | None = None) -> Redis:
    """Return a client of one server. It never retries: which calls are idempotent is decided by the callers."""
    kind = CONNECTIONS[options.get("connection_class", Connection)]
    limits: dict[str, Any] = {
        "max_connections": section.redis_connections,
        "timeout": section.redis_timeout,
        "socket_timeout": section.redis_timeout,
        "socket_connect_timeout": section.redis_timeout,
        "retry": Retry(NoBackoff(), 0),
    }
    where = {"host": address[0], "port": address[1]} if address else {}
    fixed = {
        "connection_class": kind,
        "protocol": 3,  # maps are dicts, scores numbers
        # With maintenance notifications, a pool hands out connections that the server has closed.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    return Redis.from_pool(BlockingConnectionPool(**(limits | options | where | fixed)))


class Servers(ABC):
    """The servers that hold keys, discovered before their first use and again after `invalidate`.

    Concurrent callers share one discovery. Every coroutine raises RedisError or OSError if it fails.
    """

    relayed = False
    """True if a message published at one server is relayed to subscribers of another, and may get lost."""
    silent_failover = False
    """True if a master that was replaced may go on answering without an error."""

    def __init__(self, section: BrokerSection) -> None:
        self._section, self._url = section, parse(section.redis_url)
        self._query_seconds = min(section.redis_timeout, _QUERY_SECONDS)
        self._clients: dict[Address | None, Redis] = {}
        self._addresses: frozenset[Address | None] = frozenset()
        self.changes = 0
        """Incremented whenever a discovery finds other servers."""
        self._wanted, self._current = 1, 0  # version of the addresses that callers need, and of those cached
        self._discovered_at = -_DISCOVERY_INTERVAL
        self._lock = asyncio.Lock()

    async def of(self, key: Key) -> Redis:
        """Return the server that has a key."""
        await self._ensure_discovered()
        return self._at(self._address_of(key))

    async def all(self) -> list[Redis]:
        """Return all servers that have keys."""
        await self._ensure_discovered()
        return [self._at(address) for address in self._addresses]

    async def any(self) -> Redis:
        """Return a server that receives all published messages; in a Cluster, a random one."""
        return random.choice(await self.all())

    def invalidate(self) -> None:
        """Discover the servers again before their next use."""
        self._wanted += 1

    async def moved(self, error: MovedError) -> None:
        """Record where a key is now, by a server's reply."""
        self.invalidate()

    async def refresh(self) -> None:
        """Discover the servers now if a failover could go unnoticed otherwise."""
        if self.silent_failover:
            self.invalidate()
            self._discovered_at = -_DISCOVERY_INTERVAL
        await self._ensure_discovered()

    async def _ensure_discovered(self) -> None:
        """Discover the servers unless the cache is valid, or the last discovery was a moment ago."""
        wanted = self._wanted
        is_recent = self.changes and time.monotonic() - self._discovered_at < _DISCOVERY_INTERVAL
        if wanted == self._current or is_recent:
            return
        async with self._lock:
            if self._current < wanted:  # no other caller discovered them meanwhile
                wanted = self._wanted
                await self._replace(await self._discover())
                self._current, self._discovered_at = wanted, time.monotonic()

    async def _replace(self, found: frozenset[Address | None]) -> None:
        if found != self._addresses:
            if self.changes:
                log.warning("the master is another", extra={"addresses": sorted(map(str, found))})
            self._addresses, self.changes = found, self.changes + 1
        for address in self._clients.keys() - found:
            # Running calls finish on their connections; new calls go to the new servers.
            await self._clients.pop(address).connection_pool.disconnect(inuse_connections=False)

    def _at(self, address: Address | None) -> Redis:
        if address not in self._clients:
            self._clients[address] = _client(self._section, self._url.options, address)
        return self._clients[address]

    @abstractmethod
    async def _discover(self) -> frozenset[Address | None]:
        """Return the addresses of the servers that hold keys; None stands for the URL's own address."""

    def _address_of(self, key: Key) -> Address | None:
        (address,) = self._addresses
        return address

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()


class Single(Servers):
    """One server."""

    async def _discover(self) -> frozenset[Address | None]:
        return frozenset({None})


class Sentinels(Servers):
    """The master, as named by the first Sentinel that answers."""

    silent_failover = True  # a master that is partitioned from the Sentinels does not learn that it was replaced

    def __init__(self, section: BrokerSection):
        super().__init__(section)
        query = section.model_copy(update={"redis_timeout": self._query_seconds})
        self._sentinel = Sentinel([])
        self._sentinel.sentinels = [_client(query, self._url.sentinel_options, each) for each in self._url.addresses]

    async def _discover(self) -> frozenset[Address | None]:
        try:
            return frozenset({await self._sentinel.discover_master(self._url.service)})
        except RedisError as error:
            raise RedisConnectionError(f"no Sentinel names the master of '{self._url.service}': {error}") from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self._sentinel.aclose()
        await super().aclose()


class Cluster(Servers):
    """The masters of a Redis Cluster, by slot."""

    relayed = True

    def __init__(self, section: BrokerSection):
        super().__init__(section)
        options = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), self._query_seconds) | self._url.options
        self._cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self._url.addresses],
            require_full_coverage=False,
            ssl=options.pop("connection_class", Connection) is SSLConnection,
            **options,
        )

    async def _discover(self) -> frozenset[Address | None]:
        try:
            # Not RedisCluster.initialize, which also asks for COMMAND.
            await self._cluster.nodes_manager.initialize()
        except (RedisClusterException, IndexError) as error:  # IndexError: no node serves a slot
            raise RedisConnectionError(f"no node of the Cluster says where the slots are: {error}") from error
        return frozenset(map(_address, self._cluster.get_primaries()))

    def _address_of(self, key: Key) -> Address | None:
        try:
            return _address(cast(ClusterNode, self._cluster.get_node_from_key(cast(str, key))))
        except SlotNotCoveredError as error:
            self.invalidate()
            raise RedisConnectionError(f"no node of the Cluster serves the slot of {key!r}") from error

    async def moved(self, error: MovedError) -> None:
        """Record where a slot is now."""
        self.invalidate()
        with suppress(KeyError):  # a slot that had no node
            if error.host:
                await self._cluster.nodes_manager.move_slot(error)

    async def aclose(self) -> None:
        """Close all connections."""
        for name in ("nodes_cache", "startup_nodes"):
            await self._cluster.nodes_manager.aclose(name)
        await super().aclose()


def _address(node: ClusterNode) -> Address:
    return node.host, int(node.port)
