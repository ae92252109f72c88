"""Waiting without polling: scripts publish changes, and every broker process wakes its waiters for them.

A waiter registers, clears, queries, and then waits: a change between query and wait is not missed. A subscription that
was broken wakes all waiters when it is restored, because changes may have been missed. Where hundreds wait for the same
thing, and a change admits one or two, they wait in a queue: one is woken per change, in FIFO order.
"""

import asyncio
import json
from collections.abc import Iterable
from weakref import WeakSet, WeakValueDictionary

from quartet.v1 import broker_pb2
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from quartet_broker import keys
from quartet_broker.servers import Servers
from quartet_common.log import get_logger
from quartet_common.outage import Outage

log = get_logger(__name__)

EVERYONE = "*"
_LOOK_SECONDS = 1.0
# A subscription that is silent for this long is sent a PING, and has as long again to answer it.
_SILENT_SECONDS = 5.0
# Messages that Cluster nodes relay may get lost: all waiters are woken at this interval.
_RELAYED_SECONDS = 15.0


class Waiter:
    """Waits for topics of one run. `details` collects what came with a topic, e.g. ids of finished instances."""

    def __init__(self, topics: frozenset[str], notifier: "Notifier", of_run: "WeakSet[Waiter]"):
        """`of_run`: all waiters of the run, kept alive by each of them."""
        self.topics = topics
        self._of_run = of_run
        of_run.add(self)
        self.details: set[str] = set()
        self.missed = False
        self._notifier = notifier
        self._notified = asyncio.Event()

    def clear(self) -> None:
        """Forget earlier changes: the caller is about to query."""
        self._notified.clear()

    def notify(self, details: Iterable[str] = (), missed: bool = False) -> None:
        """Wake the waiter."""
        self.details.update(details)
        self.missed |= missed
        self._notified.set()

    async def wait(self, until: float | None = None) -> bool:
        """Wait for a change until `until`, in event loop time. Return False on timeout or if the broker stops."""
        if self._notifier.closed:
            return False
        try:
            async with asyncio.timeout_at(until):
                await self._notified.wait()
        except TimeoutError:
            return False
        return not self._notifier.closed


class Notifier:
    """One subscription to the changes of all runs, shared by all calls of this process."""

    def __init__(self, servers: Servers):
        self._servers = servers
        self._waiters: WeakValueDictionary[str, WeakSet[Waiter]] = WeakValueDictionary()
        self.closed = False
        self.listening = asyncio.Event()
        self._outage = Outage()

    def waiter(self, run_id: str, *topics: str) -> Waiter:
        """Return a waiter for topics of a run; it is notified as long as it is referenced."""
        of_run = self._waiters.get(run_id)
        if of_run is None:
            of_run = self._waiters[run_id] = WeakSet()
        return Waiter(frozenset((*topics, EVERYONE)), self, of_run)

    async def listen(self) -> None:
        """Stay subscribed until the broker stops, also when the subscription breaks or the servers change."""
        while not self.closed:
            try:
                server = await self._servers.any()
                async with server.pubsub() as subscription:
                    await subscription.psubscribe(keys.CHANNELS)
                    await self._receive_all(subscription, self._servers.changes)
            except (RedisError, OSError) as error:
                self._servers.invalidate()
                if self._outage.to_be_logged():
                    log.warning("subscription to Redis broke, trying again: %s", error)
                await self._outage.wait()
            finally:
                self.listening.clear()

    async def _receive_all(self, subscription: PubSub, changes: int) -> None:
        """Handle messages until the servers change. Raises RedisConnectionError if the server is silent."""
        loop = asyncio.get_running_loop()
        heard = woken = loop.time()
        asked = False
        while not self.closed and self._servers.changes == changes:
            message = await subscription.get_message(timeout=_LOOK_SECONDS)
            now = loop.time()
            if message is not None:
                heard, asked = now, False
                self._handle(message)
            elif now - heard > 2 * _SILENT_SECONDS:
                raise RedisConnectionError(f"the server was silent for {now - heard:.0f} s")
            elif now - heard > _SILENT_SECONDS and not asked:
                asked = True
                await subscription.ping()
            if self._servers.relayed and now - woken > _RELAYED_SECONDS:
                woken = now
                self._wake_all(missed=True)

    def _handle(self, message: dict) -> None:
        if message["type"] == "psubscribe":
            self.listening.set()
            self._outage.over()
            self._wake_all(missed=True)
        elif message["type"] == "pmessage":
            run_id = keys.run_of_channel(message["channel"].decode())
            waiters = tuple(self._waiters.get(run_id, ()))
            for line in message["data"].decode().split("\n"):
                topic, _, details = line.partition(" ")
                ids = json.loads(details) if details else ()
                for waiter in waiters:
                    if topic in waiter.topics or topic == EVERYONE:
                        waiter.notify(ids)

    def _wake_all(self, missed: bool) -> None:
        for waiters in tuple(self._waiters.values()):
            for waiter in tuple(waiters):
                waiter.notify(missed=missed)

    async def close(self) -> None:
        """Wake all waiters, now and whenever they wait again: the broker stops."""
        self.closed = True
        self._wake_all(missed=False)


class WaitQueue:
    """A run's rollouts that wait with the same weights: admission is the same for all, so only the first queries."""

    def __init__(self, waiter: Waiter):
        """`waiter`: for the run's prompts."""
        self.waiter = waiter
        self.waiter.notify()  # the first caller queries at once
        self.refusal: broker_pb2.LeasePromptsResponse | None = None
        """The last response that granted nothing."""
        self.turn = asyncio.Lock()
        """Held by the first in the queue; FIFO."""
