"""Which slots are free, and who waits for some: first come, first served."""

import asyncio
from collections import deque


class Slots:
    """Numbered places; two are taken together or not at all."""

    def __init__(self, numbers: range):
        self._free = deque(numbers)
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    async def take(self, count: int) -> list[int]:
        """Wait for `count` slots and take them."""
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, future))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(future.result())
            else:
                self._waiting.remove((count, future))
                self._serve()
            raise

    def give(self, numbers: list[int]) -> None:
        """Give slots back."""
        self._free.extend(numbers)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= len(self._free):
            count, future = self._waiting.popleft()
            if future.cancelled():
                continue
            future.set_result([self._free.popleft() for _ in range(count)])
