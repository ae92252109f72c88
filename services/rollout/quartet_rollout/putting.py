"""PutExperience in small batches: while one call is under way the next batch gathers."""

import asyncio
from dataclasses import dataclass

import grpc
from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.errors import describe, retry_delay
from quartet_common.log import get_logger
from quartet_common.outage import Outage
from quartet_common.wire import Bytes, put_group, put_request
from quartet_rollout.broker_link import LARGEST_GROUP, TRANSIENT, BrokerLink
from quartet_rollout.state import RolloutState

log = get_logger(__name__)

# How long to wait before a group is put again that found no room.
_NO_ROOM_SECONDS = 0.5

# Attempts at a call that fails for no known reason.
_INTERNAL_ATTEMPTS = 3


class PutRefused(Exception):
    """The broker will not take the group; the text is its reason."""


@dataclass(eq=False)
class _Put:
    run_id: str
    parts: list[Bytes]  # of the serialized PutGroup
    size: int
    outcome: asyncio.Future[int]


class Putter:
    """Puts finished groups, in the order in which they finish."""

    def __init__(self, state: RolloutState, link: BrokerLink, batch_groups: int, batch_bytes: int):
        self._state, self._link = state, link
        self._batch_groups, self._batch_bytes = batch_groups, batch_bytes
        self._queue: asyncio.Queue[_Put] = asyncio.Queue()
        self._held: _Put | None = None

    async def put(self, lease_id: str, group: experience_pb2.ExperienceGroup) -> int:
        """Put a group and return its PutOutcome, any but NO_ROOM: that one is tried again until there is room.

        Raises:
            PutRefused: the broker cannot accept such a group.
        """
        loop = asyncio.get_running_loop()
        parts = put_group(lease_id, group.header, group.tensors, group.transcript)
        size = sum(map(len, parts))
        if size > LARGEST_GROUP:
            raise PutRefused(f"the group has {size} bytes; allowed: at most {LARGEST_GROUP}, the size of a message")
        while True:
            item = _Put(self._state.run_id, parts, size, loop.create_future())
            self._queue.put_nowait(item)
            outcome = await item.outcome
            if outcome != broker_pb2.PUT_OUTCOME_NO_ROOM:
                return outcome
            log.debug("no room for a group", extra={"group": group.header.instance_id})
            await asyncio.sleep(_NO_ROOM_SECONDS)

    async def run(self) -> None:
        """Put for as long as the service lives."""
        while True:
            await self._send(await self._gather())

    async def _gather(self) -> list[_Put]:
        """Return the next batch: at least one group, then what is there without waiting."""
        batch: list[_Put] = []
        size = 0
        while len(batch) < self._batch_groups:
            if self._held is not None:
                item, self._held = self._held, None
            elif batch and self._queue.empty():
                break
            else:
                item = await self._queue.get()
            if item.outcome.cancelled():
                continue
            if batch and (size + item.size > self._batch_bytes or item.run_id != batch[0].run_id):
                self._held = item
                break
            batch.append(item)
            size += item.size
        return batch

    async def _send(self, batch: list[_Put]) -> None:
        request = put_request(batch[0].run_id, [item.parts for item in batch])
        outage, failures = Outage(), 0
        while True:
            try:
                response = await self._link.call("PutExperience", request)
            except grpc.RpcError as error:
                failures += error.code() not in TRANSIENT
                internal = error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
                if error.code() in TRANSIENT or (internal and failures < _INTERNAL_ATTEMPTS):
                    await outage.wait(retry_delay(error))
                    if all(item.outcome.cancelled() for item in batch):
                        return
                    continue
                await self._refused(batch, error)
                return
            for item, outcome in zip(batch, response.outcomes, strict=True):
                if not item.outcome.done():
                    item.outcome.set_result(outcome)
            return

    async def _refused(self, batch: list[_Put], error: grpc.RpcError) -> None:
        """A call was refused as a whole: find the culprit by sending its groups one by one."""
        if error.code() == grpc.StatusCode.NOT_FOUND:  # the run is gone
            for item in batch:
                if not item.outcome.done():
                    item.outcome.set_result(broker_pb2.PUT_OUTCOME_FINISHED)
        elif len(batch) > 1:
            for item in batch:
                await self._send([item])
        elif not batch[0].outcome.done():
            batch[0].outcome.set_exception(PutRefused(describe(error)))
