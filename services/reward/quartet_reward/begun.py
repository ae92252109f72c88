"""Coroutines that begin in place: what waits for nothing needs no task, and no place in the queue."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


async def admitted() -> None:
    """Wait for admission to the queue; elsewhere, for one turn of the event loop.

    Until a verifier awaits this, it runs in place, without a task of its own: it must be the first that it awaits.
    """
    await asyncio.sleep(0)


class Begun(Generic[T]):
    """A coroutine that has run up to `admitted()` or to its end. Await it for the rest, within a task.

    Raises, when it is made, what the coroutine raises before that. One that awaits something else first gets a
    RuntimeError there.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]):
        self.result: T | None = None
        """None: it waits."""
        self._coroutine = coroutine
        try:
            if coroutine.send(None) is not None:  # asyncio.sleep(0) yields None
                coroutine.throw(RuntimeError("await quartet_reward.begun.admitted() before anything else"))
        except StopIteration as end:
            self.result = end.value

    def __await__(self) -> Generator[Any, Any, T]:
        return (yield from self._coroutine.__await__())
