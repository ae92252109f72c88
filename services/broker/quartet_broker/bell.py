"""Waiting without polling: scripts publish what changed, and wake those who wait for it in every broker process.

A waiter registers, clears, looks, and then waits: a change between looking and waiting is not missed. A broken
subscription wakes everyone when it stands again, because changes may have passed unheard.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from redis.asyncio import Redis
from redis.exceptions import RedisError

from quartet_broker import keys
from quartet_common.log import get_logger

log = get_logger(__name__)

EVERYONE = "*"
_RECONNECT_SECONDS = 0.5


class Waiter:
    """Waits for topics of one run. `details` collects what came with a topic, e.g. ids of finished instances."""

    def __init__(self, topics: frozenset[str], bell: "Bell"):
        self.topics = topics
        self.details: set[str] = set()
        self.missed = False
        self._bell = bell
        self._rung = asyncio.Event()

    def clear(self) -> None:
        """Forget earlier changes: the caller is about to look."""
        self._rung.clear()

    def ring(self, details: Iterable[str] = (), missed: bool = False) -> None:
        """Wake the waiter."""
        self.details.update(details)
        self.missed |= missed
        self._rung.set()

    async def wait(self, until: float | None = None) -> bool:
        """Wait for a change, at most until `until` by the loop's clock. False: time is up, or the broker stops."""
        if self._bell.closed:
            return False
        try:
            async with asyncio.timeout_at(until):
                await self._rung.wait()
        except TimeoutError:
            return False
        return not self._bell.closed


class Bell:
    """One subscription to the changes of all runs, shared by all calls of this process."""

    def __init__(self, redis: Redis):
        self._redis = redis
        self._waiters: dict[str, set[Waiter]] = defaultdict(set)
        self.closed = False
        self.listening = asyncio.Event()

    @contextmanager
    def waiter(self, run_id: str, *topics: str) -> Iterator[Waiter]:
        """Have a waiter for topics of a run while the context lasts."""
        waiter = Waiter(frozenset((*topics, EVERYONE)), self)
        self._waiters[run_id].add(waiter)
        try:
            yield waiter
        finally:
            self._waiters[run_id].discard(waiter)
            if not self._waiters[run_id]:
                del self._waiters[run_id]

    async def listen(self) -> None:
        """Subscribe for ever; subscribe again when the subscription breaks."""
        while not self.closed:
            try:
                async with self._redis.pubsub() as subscription:
                    await subscription.psubscribe(keys.BELLS)
                    while not self.closed:
                        message = await subscription.get_message(timeout=5.0)
                        if message is not None:
                            self._hear(message)
            except (RedisError, OSError) as error:
                self.listening.clear()
                log.warning("subscription to Redis broke, trying again: %s", error)
                await asyncio.sleep(_RECONNECT_SECONDS)

    def _hear(self, message: dict) -> None:
        if message["type"] == "psubscribe":
            self.listening.set()
            self._wake_all(missed=True)
        elif message["type"] == "pmessage":
            topic, _, details = message["data"].decode().partition(" ")
            ids = json.loads(details) if details else ()
            for waiter in tuple(self._waiters.get(keys.run_of_bell(message["channel"].decode()), ())):
                if topic in waiter.topics or topic == EVERYONE:
                    waiter.ring(ids)

    def _wake_all(self, missed: bool) -> None:
        for waiters in tuple(self._waiters.values()):
            for waiter in tuple(waiters):
                waiter.ring(missed=missed)

    async def close(self) -> None:
        """Let everyone who waits go: the broker stops."""
        self.closed = True
        self._wake_all(missed=False)
