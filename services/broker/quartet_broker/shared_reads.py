"""Reads of Redis that many wait for, made once."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

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
