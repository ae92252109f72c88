"""The open streams of the broker: how many a peer may have, how long one may go unread; reads that they share."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from quartet_common.errors import resource_exhausted
from quartet_common.identity import peer_of


class Streams:
    """Sends the answers of streaming calls."""

    def __init__(self, most: int, patience: float):
        """`most`: open streams of one peer. `patience`: seconds that a watcher may take for a message."""
        self._most = most
        self._patience = patience
        self._open: Counter[str] = Counter()

    async def send(
        self, context: grpc.aio.ServicerContext, answers: AsyncGenerator[Any], patience: float | None = None
    ) -> None:
        """Send answers. Raises RESOURCE_EXHAUSTED if the peer has too many streams, or reads none for `patience`."""
        self._admit(context)
        async with aclosing(answers):
            async for answer in answers:
                try:
                    async with asyncio.timeout(patience):
                        await context.write(answer)
                except TimeoutError:
                    raise resource_exhausted(
                        "stream", f"its reader took no message for {patience:g} s; watch again from the last one", 0.5
                    ) from None
                except grpc.aio.InternalError:
                    return  # the caller has gone

    async def show(self, context: grpc.aio.ServicerContext, answers: AsyncGenerator[Any]) -> None:
        """As `send`, to watchers: one that does not read is turned away."""
        await self.send(context, answers, self._patience)

    def _admit(self, context: grpc.aio.ServicerContext) -> None:
        peer = peer_of(context)
        if self._open[peer] >= self._most:
            raise resource_exhausted(
                f"streams of {peer}",
                f"{self._most} are open, the most that a peer may have (broker.max_streams_per_peer)",
            )
        self._open[peer] += 1
        context.add_done_callback(lambda _: self._close(peer))

    def _close(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


T = TypeVar("T")


class SharedReads:
    """Makes a few reads at a time. One that has not begun yet serves all who ask for the same."""

    def __init__(self, at_once: int):
        self._few = asyncio.Semaphore(at_once)
        self._waiting: dict[Hashable, asyncio.Task[Any]] = {}

    async def read(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read` returns of Redis as it is after this call, and raise what it raises."""
        task = self._waiting.get(key)
        if task is None:
            task = self._waiting[key] = asyncio.create_task(self._begin(key, read))
            task.add_done_callback(_take_exception)
        return await asyncio.shield(task)

    async def _begin(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        async with self._few:
            del self._waiting[key]  # it may miss what changes from here on
            return await read()


def _take_exception(task: asyncio.Task[Any]) -> None:
    """Whoever waited may have gone."""
    if not task.cancelled():
        task.exception()
