"""One ScoreStream call: answers each item as it completes; a cancelled call kills what is under way for it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from quartet.v1 import reward_pb2

from quartet_common.errors import ContractError, invalid_argument
from quartet_reward.failures import VerifierFailure
from quartet_reward.room import Room
from quartet_reward.scoring import Result, Scorer, Work, failure, invalid_item

# A stream may live as long as its rollout: of its items' names, this many are remembered to refuse duplicates.
_REMEMBERED_IDS = 65_536


class ScoreStream:
    """The state of one call."""

    def __init__(
        self,
        scorer: Scorer,
        room: Room,
        write: Callable[[reward_pb2.ScoreStreamResponse], Awaitable[None]],
        draining: Callable[[], bool],
    ):
        self._scorer = scorer
        self._room = room
        self._write = write
        self._draining = draining
        self._writing = asyncio.Lock()
        self._ids: dict[str, None] = {}

    async def run(self, requests: AsyncIterator[reward_pb2.ScoreStreamRequest]) -> None:
        """Answer all items.

        Reading stops while the service's queue is full: HTTP/2's flow control then slows the caller.
        """
        async with asyncio.TaskGroup() as group:
            async for request in requests:
                result = self._score(request.item)
                if isinstance(result, Result):
                    await self._send(result)
                else:
                    run = request.item.run_id
                    await self._room.take(run)
                    group.create_task(self._work(run, result))

    def _score(self, item: reward_pb2.ScoreItem) -> Result | Work:
        if self._draining():
            return failure(
                item.item_id, VerifierFailure(reward_pb2.FAILURE_KIND_SHUT_DOWN, "the reward service is shutting down")
            )
        try:
            bound = self._scorer.read(item, "item")
            self._refuse_duplicate(item.item_id)
        except ContractError as error:
            return invalid_item(item.item_id, error)
        return self._scorer.score(item, bound)

    def _refuse_duplicate(self, item_id: str) -> None:
        if item_id in self._ids:
            raise invalid_argument("item.item_id", f"'{item_id}' again", "a name unique in its call")
        self._ids[item_id] = None
        if len(self._ids) > _REMEMBERED_IDS:
            del self._ids[next(iter(self._ids))]

    async def _work(self, run: str, work: Work) -> None:
        try:
            result = await work()
        finally:
            self._room.give(run)
        await self._send(result)

    async def _send(self, result: Result) -> None:
        async with self._writing:  # one write at a time; a caller that does not read stops its own reading too
            await self._write(reward_pb2.ScoreStreamResponse(result=result))
