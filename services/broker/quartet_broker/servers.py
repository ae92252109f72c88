"""Which Redis server has a key: the only one, the master that Sentinels name, or a node of a Cluster.

What is known may be over at any moment: a master falls, a slot moves. Nobody here waits or tries again. A call that
meets a failure is told UNAVAILABLE, what was known is in doubt from then on, and the next call looks anew.
"""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Iterable
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisError

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


class _Tcp(_OnUvloop, Connection):
    pass


class _Tls(_OnUvloop, SSLConnection):
    pass


class _Unix(_OnUvloop, UnixDomainSocketConnection):
    pass


CONNECTIONS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _Tcp,
    SSLConnection: _Tls,
    UnixDomainSocketConnection: _Unix,
}
"""The class that takes the place of each of redis-py's."""


log = get_logger(__name__)

Key = str | bytes | int | float
"""What may be an argument of a command."""

# While a failover lasts every call fails: it is asked for no more often than this.
_LOOK_SECONDS = 0.1
# Nodes of a Cluster asked at once where the slots are; the first answer counts.
_ASKED_AT_ONCE = 3


def connect(section: BrokerSection) -> "Servers":
    """Return the servers of `broker.redis_url`, not connected yet."""
    url = parse(section.redis_url)
    match url.form:
        case "sentinel":
            return Sentinels(section)
        case "cluster":
            return Cluster(section)
    return Single(section)


def _client(section: BrokerSection, options: dict[str, Any], connections: int = 0) -> Redis:
    """Return a client of one server. It never retries by itself: callers are told, and know what is idempotent."""
    kind = CONNECTIONS[options.get("connection_class", Connection)]
    limits: dict[str, Any] = {
        "max_connections": connections or section.redis_connections,
        "timeout": section.redis_timeout,
        "socket_timeout": section.redis_timeout,
        "socket_connect_timeout": section.redis_timeout,
        "retry": Retry(NoBackoff(), 0),
    }
    return Redis.from_pool(BlockingConnectionPool(**(limits | options | {"connection_class": kind})))


class Servers(ABC):
    """The servers that have the broker's keys. Every coroutine raises RedisError or OSError when none can be found."""

    relayed = False
    """True if a message published at one server is relayed to subscribers of another, and may get lost."""

    def __init__(self) -> None:
        self.changes = 0
        """Grows when the servers turn out to be others than before."""

    @abstractmethod
    async def of(self, key: Key) -> Redis:
        """Return the server that has a key."""

    @abstractmethod
    async def all(self) -> list[Redis]:
        """Return all servers that have keys."""

    async def any(self) -> Redis:
        """Return a server at which all messages arrive; another one each time, where there are several."""
        return random.choice(await self.all())

    @abstractmethod
    def doubt(self) -> None:
        """Look anew before the next use: something failed as if the servers were others now."""

    def moved(self, error: MovedError) -> None:
        """Take in what a server said about where a key is now."""
        self.doubt()

    @abstractmethod
    async def look(self) -> None:
        """Look now, if nobody would tell that the servers are others."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close all connections."""


class Single(Servers):
    """One server."""

    def __init__(self, section: BrokerSection):
        super().__init__()
        self.client = _client(section, parse(section.redis_url).options)

    async def of(self, key: Key) -> Redis:
        """Return the server."""
        return self.client

    async def all(self) -> list[Redis]:
        """Return the server."""
        return [self.client]

    def doubt(self) -> None:
        """There is no other."""

    async def look(self) -> None:
        """There is no other."""

    async def aclose(self) -> None:
        """Close all connections."""
        await self.client.aclose()


class _Found(Servers):
    """Servers that have to be looked for: one look at a time, for all who wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._doubts = 1
        self._dispelled = 0
        self._looked_at = -_LOOK_SECONDS
        self._lock = asyncio.Lock()

    def doubt(self) -> None:
        """Look anew before the next use."""
        self._doubts += 1

    async def _known(self) -> None:
        """Look, unless there is no doubt, or one looked a moment ago."""
        doubts = self._doubts
        if doubts == self._dispelled or (self.changes and time.monotonic() - self._looked_at < _LOOK_SECONDS):
            return
        async with self._lock:
            if self._dispelled < doubts:  # nobody looked while we waited
                doubts = self._doubts
                await self._look()
                self._dispelled, self._looked_at = doubts, time.monotonic()

    @abstractmethod
    async def _look(self) -> None:
        """Find the servers."""


class Sentinels(_Found):
    """The master that most of the Sentinels that answer name."""

    def __init__(self, section: BrokerSection):
        super().__init__()
        self._section = section
        self._url = parse(section.redis_url)
        self._sentinels = [
            _client(section, self._url.sentinel_options | {"host": host, "port": port}, connections=4)
            for host, port in self._url.addresses
        ]
        self._address: Address | None = None
        self._master: Redis | None = None

    async def of(self, key: Key) -> Redis:
        """Return the master."""
        await self._known()
        assert self._master is not None
        return self._master

    async def all(self) -> list[Redis]:
        """Return the master."""
        return [await self.of("")]

    async def look(self) -> None:
        """Ask the Sentinels: a master that was cut off from them does not know that there is another."""
        self.doubt()
        self._looked_at = -_LOOK_SECONDS
        await self._known()

    async def _look(self) -> None:
        votes: Counter[Address] = Counter()
        failures: list[str] = []
        asked = [asyncio.ensure_future(self._ask(sentinel)) for sentinel in self._sentinels]
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    votes[await answer] += 1
                except (RedisError, OSError) as error:
                    failures.append(str(error))
                if votes and max(votes.values()) > len(asked) // 2:
                    break
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not votes:
            reasons = "; ".join(failures)
            raise RedisConnectionError(f"no Sentinel names the master of '{self._url.service}': {reasons}")
        await self._take(votes.most_common(1)[0][0])

    async def _ask(self, sentinel: Redis) -> Address:
        answer = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.service)
        if not answer:
            raise RedisConnectionError("it knows no such master")
        return _text(answer[0]), int(answer[1])

    async def _take(self, address: Address) -> None:
        if address == self._address:
            return
        host, port = address
        if self._master is not None:
            log.warning(
                "the master is another", extra={"sentinel_service": self._url.service, "address": f"{host}:{port}"}
            )
            # Calls under way end by themselves; nothing new goes to the old one.
            await self._master.connection_pool.disconnect(inuse_connections=False)
        self._address, self.changes = address, self.changes + 1
        self._master = _client(self._section, self._url.options | {"host": host, "port": port})

    async def aclose(self) -> None:
        """Close all connections."""
        for client in (*self._sentinels, *([self._master] if self._master else [])):
            await client.aclose()


class Cluster(_Found):
    """The masters of a Redis Cluster, by slot."""

    relayed = True

    def __init__(self, section: BrokerSection):
        super().__init__()
        self._section = section
        self._url = parse(section.redis_url)
        self._clients: dict[Address, Redis] = {}
        self._owners: dict[int, Address] = {}
        self._masters: tuple[Address, ...] = ()
        self._replicas: tuple[Address, ...] = ()

    async def of(self, key: Key) -> Redis:
        """Return the master of a key's slot."""
        await self._known()
        slot = key_slot(key if isinstance(key, bytes) else str(key).encode())
        owner = self._owners.get(slot)
        if owner is None:
            self.doubt()
            raise RedisConnectionError(f"no node of the Cluster serves slot {slot}")
        return self._at(owner)

    async def all(self) -> list[Redis]:
        """Return all masters."""
        await self._known()
        return [self._at(address) for address in self._masters]

    async def look(self) -> None:
        """Nothing to do: a node that lost its slots, or the others, says so itself."""

    def moved(self, error: MovedError) -> None:
        """Take in where a slot is now."""
        if error.host:
            self._owners[error.slot_id] = (error.host, error.port)
        self.doubt()

    def _at(self, address: Address) -> Redis:
        client = self._clients.get(address)
        if client is None:
            host, port = address
            client = self._clients[address] = _client(self._section, self._url.options | {"host": host, "port": port})
        return client

    async def _look(self) -> None:
        candidates = list(dict.fromkeys((*self._masters, *self._replicas, *self._url.addresses)))
        random.shuffle(candidates)  # one that was cut off and knows old things is not asked for ever
        failures: list[str] = []
        for start in range(0, len(candidates), _ASKED_AT_ONCE):
            slots = await self._first([self._slots(a) for a in candidates[start : start + _ASKED_AT_ONCE]], failures)
            if slots:
                return await self._take(slots)
        raise RedisConnectionError(f"no node of the Cluster says where the slots are: {'; '.join(failures)}")

    async def _slots(self, address: Address) -> list[tuple[int, int, list[Address]]]:
        """Ask a node for (first slot, last slot, master and replicas)."""
        # In two words: as one redis-py would make something else of the answer.
        answer = await self._at(address).execute_command("CLUSTER", "SLOTS")
        return [
            # A node that does not know its own address is where it was asked.
            (first, last, [(_text(node[0] or b"") or address[0], int(node[1])) for node in nodes])
            for first, last, *nodes in answer
        ]

    async def _first(self, asked: list[Awaitable[list]], failures: list[str]) -> list:
        tasks = [asyncio.ensure_future(one) for one in asked]
        try:
            for answer in asyncio.as_completed(tasks):
                try:
                    slots = await answer
                except (RedisError, OSError) as error:
                    failures.append(str(error))
                    continue
                if slots:
                    return slots
                failures.append("a node that is in no Cluster, or serves no slot")
            return []
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, slots: list[tuple[int, int, list[Address]]]) -> None:
        owners = {slot: nodes[0] for first, last, nodes in slots for slot in range(first, last + 1)}
        self._replicas = tuple(dict.fromkeys(address for _, _, nodes in slots for address in nodes[1:]))
        if owners == self._owners and self.changes:
            return
        self._owners, self.changes = owners, self.changes + 1
        self._masters = tuple(dict.fromkeys(owners.values()))
        gone = set(self._clients) - {*self._masters, *self._replicas}
        for address in gone:
            await self._clients.pop(address).connection_pool.disconnect(inuse_connections=False)

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
