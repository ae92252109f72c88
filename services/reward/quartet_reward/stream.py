"""One ScoreStream call: answers each item as it completes; a cancelled call kills what is under way for it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from quartet.v1 import reward_pb2

from quartet_common.errors import ContractError, invalid_argument
from quartet_reward.admission import Admission
from quartet_reward.config import MOST_ITEMS
from quartet_reward.errors import VerifierFailure
from quartet_reward.scoring import LONG_BYTES, Result, Scorer, Work, failure, invalid_item

# Items scored in one go before other calls have their turn, if their size together is below LONG_BYTES.
_STRIDE = 64
# A stream may live as long as its rollout: of its items' names, this many are remembered to refuse duplicates.
_REMEMBERED_IDS = 65_536
# Results of one message; the rest follows in the next.
_MOST_RESULTS = 256

Send = Callable[[Result], Awaitable[None]]


async def in_strides(items: Iterable[reward_pb2.ScoreItem]) -> AsyncIterator[tuple[int, reward_pb2.ScoreItem, int]]:
    """Yield items, their places and their sizes; between some of them others have their turn in the event loop."""
    total = 0
    for i, item in enumerate(items):
        size = item.ByteSize()
        yield i, item, size
        total += size
        if total > LONG_BYTES or i % _STRIDE == _STRIDE - 1:
            total = 0
            await asyncio.sleep(0)


class ScoreStream:
    """The state of one call."""

    def __init__(
        self,
        scorer: Scorer,
        admission: Admission,
        write: Callable[[reward_pb2.ScoreStreamResponse], Awaitable[None]],
        draining: Callable[[], bool],
    ):
        self._scorer = scorer
        self._admission = admission
        self._write = write
        self._draining = draining
        self._writing = asyncio.Lock()
        self._unwritten: deque[Result] = deque()
        self._ids: dict[str, None] = {}

    async def run(self, requests: AsyncIterator[reward_pb2.ScoreStreamRequest]) -> None:
        """Answer all items.

        Reading stops while the service's queue is full: HTTP/2's flow control then slows the caller.

        Raises:
            ContractError: INVALID_ARGUMENT, a request that cannot be understood.
        """
        async with asyncio.TaskGroup() as group:
            async for request in requests:
                if request.items:
                    await self._take_on_all(request, group)
                else:
                    await self._take_on(request.item, self._send, group)

    async def _take_on(self, item: reward_pb2.ScoreItem, send: Send, group: asyncio.TaskGroup) -> None:
        result = self._score(item, item.ByteSize())
        if isinstance(result, reward_pb2.ScoreResult):
            await send(result)
        else:
            await self._begin(item, result, send, group)

    async def _take_on_all(self, request: reward_pb2.ScoreStreamRequest, group: asyncio.TaskGroup) -> None:
        """Score several items; what can be said at once is said in one message."""
        if len(request.items) > MOST_ITEMS:
            raise invalid_argument("items", f"{len(request.items)} items", f"at most {MOST_ITEMS}")
        if request.HasField("item"):
            raise invalid_argument("item", "an item beside `items`", "one of both")
        later: list[tuple[reward_pb2.ScoreItem, Work]] = []
        async for _, item, size in in_strides(request.items):
            result = self._score(item, size)
            if isinstance(result, reward_pb2.ScoreResult):
                self._unwritten.append(result)
            else:
                later.append((item, result))
        await self._flush()
        for item, work in later:
            await self._begin(item, work, self._send_with_others, group)

    def _score(self, item: reward_pb2.ScoreItem, size: int) -> Result | Work:
        if self._draining():
            return failure(
                item.item_id, VerifierFailure(reward_pb2.FAILURE_KIND_SHUT_DOWN, "the reward service is shutting down")
            )
        try:
            result = self._scorer.score(item, "item", size)
            self._refuse_duplicate(item.item_id)
            return result
        except ContractError as error:
            return invalid_item(item.item_id, error)

    def _refuse_duplicate(self, item_id: str) -> None:
        if item_id in self._ids:
            raise invalid_argument("item.item_id", f"'{item_id}' again", "a name unique in its call")
        self._ids[item_id] = None
        if len(self._ids) > _REMEMBERED_IDS:
            del self._ids[next(iter(self._ids))]

    async def _begin(self, item: reward_pb2.ScoreItem, work: Work, send: Send, group: asyncio.TaskGroup) -> None:
        """Wait for room, then have an item worked on beside the others."""
        run, places = item.run_id, work.places
        await self._admission.take(run, places)

        async def finish() -> None:
            try:
                result = await work.run()
            finally:
                self._admission.give(run, places)
            await send(result)

        group.create_task(finish())

    async def _send(self, result: Result) -> None:
        async with self._writing:  # one write at a time; a caller that does not read stops its own reading too
            await self._write(reward_pb2.ScoreStreamResponse(result=result))

    async def _send_with_others(self, result: Result) -> None:
        """Send a result together with those that come while the message before is being written."""
        self._unwritten.append(result)
        await self._flush()

    async def _flush(self) -> None:
        async with self._writing:
            while self._unwritten:
                count = min(len(self._unwritten), _MOST_RESULTS)
                results = [self._unwritten.popleft() for _ in range(count)]
                await self._write(reward_pb2.ScoreStreamResponse(results=results))
