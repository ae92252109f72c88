"""Limits on streaming responses (open streams per peer, time per message), shared reads, and pages of listings."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from quartet_common.errors import invalid_argument, resource_exhausted
from quartet_common.identity import peer_of


class Streams:
    """Sends the responses of streaming calls."""

    def __init__(self, most: int, patience: float):
        """`most`: open streams of one peer. `patience`: seconds that a watcher may take to read a message."""
        self._most = most
        self._patience = patience
        self._open: Counter[str] = Counter()

    async def send(
        self, context: grpc.aio.ServicerContext, answers: AsyncGenerator[Any], patience: float | None = None
    ) -> None:
        """Send responses.

        Raises RESOURCE_EXHAUSTED if the peer has too many streams, or takes more than `patience` seconds for a message.
        """
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
        """Send responses to a watcher; end the stream of one that stops reading."""
        await self.send(context, answers, self._patience)

    def _admit(self, context: grpc.aio.ServicerContext) -> None:
        peer = peer_of(context)
        if self._open[peer] >= self._most:
            raise resource_exhausted(
                f"streams of {peer}",
                f"{self._most} are open, the most that a peer may have (broker.max_streams_per_peer)",
            )
        self._open[peer] += 1
        context.add_done_callback(lambda _: self._close(peer))  # type: ignore[arg-type]  # a class in types-grpcio

    def _close(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


T = TypeVar("T")


class SharedReads:
    """Limits concurrent reads. A read that has not begun is shared by all callers with the same key."""

    def __init__(self, at_once: int):
        self._reading = asyncio.Semaphore(at_once)
        self._waiting: dict[Hashable, asyncio.Task[Any]] = {}

    async def read(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a `read` that begins after this call, or raise its error."""
        task = self._waiting.get(key)
        if task is None:
            task = self._waiting[key] = asyncio.create_task(self._begin(key, read))
            task.add_done_callback(_take_exception)
        return await asyncio.shield(task)

    async def _begin(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        async with self._reading:
            del self._waiting[key]  # later callers need another read, which sees later changes
            return await read()


def _take_exception(task: asyncio.Task[Any]) -> None:
    """Mark the exception as retrieved, even if every waiting caller was cancelled."""
    if not task.cancelled():
        task.exception()


Position = tuple[float, str]
"""Score and id in the sorted set that is listed, which is in this order."""
MessageT = TypeVar("MessageT", bound=Message)


def read_page_token(token: str) -> Position | None:
    """Return the position after which a page begins, None for the first page. Raises INVALID_ARGUMENT."""
    if not token:
        return None
    score, _, name = token.partition(":")
    with suppress(ValueError):
        if not math.isnan(at := float(score)):
            return at, name
    raise invalid_argument("page_token", repr(token[:80]), "empty, or a next_page_token")


async def fill_page(
    entries: Sequence[Position],
    load: Callable[[list[str]], Awaitable[Sequence[MessageT | None]]],
    at_once: int,
    room: int,
    limit: int,
) -> tuple[list[MessageT], str]:
    """Return a page and the token of the next one, "" after the last.

    Args:
        entries: the listing from the page's beginning on.
        load: returns the message of each id; None for one that no longer exists.
        at_once: ids per `load`.
        room: maximum bytes of the page's messages.
        limit: maximum messages.
    """
    page: list[MessageT] = []
    last = ""
    for start in range(0, len(entries), at_once):
        part = entries[start : start + at_once]
        for (score, name), message in zip(part, await load([name for _, name in part]), strict=True):
            if message is None:
                continue
            room -= message.ByteSize()
            if page and (room < 0 or len(page) == limit):
                return page, last
            page.append(message)
            last = f"{score!r}:{name}"
    return page, ""
