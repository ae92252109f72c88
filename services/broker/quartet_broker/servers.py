"""Which Redis server has a key: the only one, the master that Sentinels name, or a node of a Cluster.

redis-py's Sentinel and RedisCluster find the servers; calls go over pools of ours, whose connections callers wait for.
What is known may be over at any moment: a master falls, a slot moves. Nobody here waits or tries again. A call that
meets a failure is told UNAVAILABLE, what was known is in doubt from then on, and the next call looks anew.
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
"""The class that takes the place of each of redis-py's."""


log = get_logger(__name__)

Key = str | bytes | int | float
"""What may be an argument of a command."""

# While a failover lasts every call fails: servers are looked for no more often than this.
_LOOK_SECONDS = 0.1
# Sentinels, and nodes of a Cluster, are asked one after another: one that hangs holds up all calls for so long.
_ASKED_SECONDS = 1.0


def connect(section: BrokerSection) -> "Servers":
    """Return the servers of `broker.redis_url`, not connected yet."""
    forms: dict[str, type[Single | Sentinels | Cluster]] = {"single": Single, "sentinel": Sentinels, "cluster": Cluster}
    return forms[parse(section.redis_url).form](section)


def _client(section: BrokerSection, options: dict[str, Any], address: Address | None = None) -> Redis:
    """Return a client of one server. It never retries by itself: callers are told, and know what is idempotent."""
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
        # With notifications of a maintenance, a pool hands out connections that the server has closed.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    return Redis.from_pool(BlockingConnectionPool(**(limits | options | where | fixed)))


class Servers(ABC):
    """The servers that have keys: found before they are first used, and again once there is doubt.

    One look at a time serves all who wait for it. Every coroutine raises RedisError or OSError when none can be found.
    """

    relayed = False
    """True if a message published at one server is relayed to subscribers of another, and may get lost."""
    untold = False
    """True if a server that has lost its keys to another may go on without a word."""

    def __init__(self, section: BrokerSection) -> None:
        self._section, self._url = section, parse(section.redis_url)
        self._asked_seconds = min(section.redis_timeout, _ASKED_SECONDS)
        self._clients: dict[Address | None, Redis] = {}
        self._addresses: frozenset[Address | None] = frozenset()
        self.changes = 0
        """Grows when the servers turn out to be others than before."""
        self._doubts, self._dispelled = 1, 0
        self._looked_at = -_LOOK_SECONDS
        self._lock = asyncio.Lock()

    async def of(self, key: Key) -> Redis:
        """Return the server that has a key."""
        await self._known()
        return self._at(self._address_of(key))

    async def all(self) -> list[Redis]:
        """Return all servers that have keys."""
        await self._known()
        return [self._at(address) for address in self._addresses]

    async def any(self) -> Redis:
        """Return a server at which all messages arrive; another one each time, where there are several."""
        return random.choice(await self.all())

    def doubt(self) -> None:
        """Look anew before the next use: something failed as if the servers were others now."""
        self._doubts += 1

    async def moved(self, error: MovedError) -> None:
        """Take in what a server said about where a key is now."""
        self.doubt()

    async def look(self) -> None:
        """Look now, if nobody would tell that the servers are others."""
        if self.untold:
            self.doubt()
            self._looked_at = -_LOOK_SECONDS
        await self._known()

    async def _known(self) -> None:
        """Look, unless there is no doubt, or one looked a moment ago."""
        doubts = self._doubts
        if doubts == self._dispelled or (self.changes and time.monotonic() - self._looked_at < _LOOK_SECONDS):
            return
        async with self._lock:
            if self._dispelled < doubts:  # nobody looked while we waited
                doubts = self._doubts
                await self._take(await self._find())
                self._dispelled, self._looked_at = doubts, time.monotonic()

    async def _take(self, found: frozenset[Address | None]) -> None:
        if found != self._addresses:
            if self.changes:
                log.warning("the master is another", extra={"addresses": sorted(map(str, found))})
            self._addresses, self.changes = found, self.changes + 1
        for address in self._clients.keys() - found:
            # Calls under way end by themselves; nothing new goes to the old one.
            await self._clients.pop(address).connection_pool.disconnect(inuse_connections=False)

    def _at(self, address: Address | None) -> Redis:
        if address not in self._clients:
            self._clients[address] = _client(self._section, self._url.options, address)
        return self._clients[address]

    @abstractmethod
    async def _find(self) -> frozenset[Address | None]:
        """Return the addresses of the servers that have keys; None: the URL's own."""

    def _address_of(self, key: Key) -> Address | None:
        (address,) = self._addresses
        return address

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()


class Single(Servers):
    """One server."""

    async def _find(self) -> frozenset[Address | None]:
        return frozenset({None})


class Sentinels(Servers):
    """The master that the first of the Sentinels to answer names."""

    untold = True  # a master that was cut off from them does not know that there is another

    def __init__(self, section: BrokerSection):
        super().__init__(section)
        asked = section.model_copy(update={"redis_timeout": self._asked_seconds})
        self._sentinel = Sentinel([])
        self._sentinel.sentinels = [_client(asked, self._url.sentinel_options, each) for each in self._url.addresses]

    async def _find(self) -> frozenset[Address | None]:
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
        options = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), self._asked_seconds) | self._url.options
        self._cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self._url.addresses],
            require_full_coverage=False,
            ssl=options.pop("connection_class", Connection) is SSLConnection,
            **options,
        )

    async def _find(self) -> frozenset[Address | None]:
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
            self.doubt()
            raise RedisConnectionError(f"no node of the Cluster serves the slot of {key!r}") from error

    async def moved(self, error: MovedError) -> None:
        """Take in where a slot is now."""
        self.doubt()
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
