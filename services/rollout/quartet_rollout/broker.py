"""Calls to the broker, this rollout's leases on prompts, and the upload of finished groups.

Each call has a deadline; while the broker cannot be reached, the service logs and reports that it waits. Groups are
uploaded in small batches: during one call the next batch is collected.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, experience_pb2

from quartet_common.diagnosis import Peer
from quartet_common.errors import AWAY, describe, retry_delay
from quartet_common.handshake import WaitingFor, handshake
from quartet_common.log import get_logger
from quartet_common.outage import Outage
from quartet_rollout.state import RolloutState
from quartet_server.wire import Bytes, put_experience, put_group, put_request

log = get_logger(__name__)

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Request: TypeAlias = Message | Bytes

# The call may not have reached the broker, or may succeed later.
TRANSIENT = AWAY | {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}

# Unexpected errors in the broker, which may be temporary.
_UNEXPLAINED = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
_UNEXPLAINED_ATTEMPTS = 3

# Largest serialized group: messages have at most 64 MiB, with the fields around it.
LARGEST_GROUP = 63 << 20


class BrokerLink:
    """The one channel to the broker."""

    def __init__(self, channel: grpc.aio.Channel, peer: Peer, waiting: WaitingFor, timeout: float):
        self._channel = channel
        self.stub = broker_pb2_grpc.BrokerServiceStub(channel)
        self.put_experience = put_experience(channel)
        self._peer = peer
        self._outage = Outage()
        self._waiting = waiting
        self._timeout = timeout

    async def handshake(self) -> None:
        """Retried until the broker answers. Raises grpc.RpcError if it rejects the rollout."""
        await self._repeat(lambda: self._noted(handshake(self._channel, common_pb2.SERVICE_KIND_ROLLOUT), TRANSIENT))

    async def call(
        self, rpc: Callable[..., Awaitable[Answer]], request: Request, timeout: float | None = None
    ) -> Answer:
        """Call a method of `stub`, or `put_experience`. Raises grpc.RpcError."""
        return await self._noted(rpc(request, timeout=timeout or self._timeout), {grpc.StatusCode.UNAVAILABLE})

    async def call_with_retry(
        self, rpc: Callable[..., Awaitable[Answer]], request: Request, timeout: float | None = None
    ) -> Answer:
        """Make an idempotent call, retried until the broker answers. Raises grpc.RpcError for permanent errors."""
        return await self._repeat(lambda: self.call(rpc, request, timeout))

    async def _repeat(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        outage, unexplained = Outage(), 0
        while True:
            try:
                return await call()
            except grpc.RpcError as error:
                unexplained += error.code() in _UNEXPLAINED
                passes = error.code() in TRANSIENT or error.code() in _UNEXPLAINED
                if not passes or unexplained >= _UNEXPLAINED_ATTEMPTS:
                    raise
                await outage.wait(retry_delay(error))

    async def _noted(self, call: Awaitable[Answer], away: Container[grpc.StatusCode]) -> Answer:
        """Await a call, and record whether the broker could be reached: a code in `away` means that it could not."""
        try:
            response = await call
        except grpc.RpcError as error:
            if error.code() in away:
                self._outage.failed()
                self._waiting.add(str(self._peer))
                if self._outage.to_be_logged():
                    log.warning("calling again: %s", await self._peer.explain_aside(error))
            raise
        self._outage.over()
        self._waiting.discard(str(self._peer))
        return response


# Most leases in one call, so that a call stays small.
_CHUNK = 512


class Leases:
    """Renews and releases leases."""

    def __init__(self, state: RolloutState, link: BrokerLink):
        self._state, self._link = state, link

    async def renew(self, lease_ids: list[str], timeout: float) -> list[str]:
        """Renew leases; return those that the broker reports as lost, none if it cannot be reached."""
        lost: list[str] = []
        for chunk in _chunks(lease_ids):
            request = broker_pb2.RenewLeasesRequest(run_id=self._state.run_id, lease_ids=chunk)
            try:
                lost += (await self._link.call(self._link.stub.RenewLeases, request, timeout)).lost
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:  # the run is gone
                    return lease_ids
                log.warning("could not renew leases: %s", describe(error), extra={"count": len(chunk)})
        return lost

    async def unscored(self, lease: broker_pb2.PromptLease) -> bytes:
        """Return a leased prompt's completions of an earlier delivery, a serialized UnscoredGroup. Raises
        grpc.RpcError."""
        request = broker_pb2.GetUnscoredRequest(run_id=self._state.run_id, instance_id=lease.instance.instance_id)
        return (await self._link.call_with_retry(self._link.stub.GetUnscored, request)).unscored

    async def release(
        self, releases: Iterable[broker_pb2.LeaseRelease], timeout: float | None = 10.0, run_id: str = ""
    ) -> None:
        """Release leases; those that do not reach the broker expire.

        Args:
            timeout: of the retries, in seconds; None: no limit.
            run_id: the leases' run; default: the current one.
        """
        for chunk in _chunks(list(releases)):
            request = broker_pb2.ReleaseLeasesRequest(run_id=run_id or self._state.run_id, releases=chunk)
            try:
                async with asyncio.timeout(timeout):
                    await self._link.call_with_retry(self._link.stub.ReleaseLeases, request)
            except TimeoutError:
                log.warning("the broker did not take leases back; they will expire", extra={"count": len(chunk)})
                return
            except grpc.RpcError as error:
                # Nothing is lost: the run has ended or was deleted, or the leases expire.
                log.info("leases not given back: %s", describe(error), extra={"count": len(chunk)})


def _chunks(items: list[Item]) -> Iterator[list[Item]]:
    for begin in range(0, len(items), _CHUNK):
        yield items[begin : begin + _CHUNK]


# Limits of one call; a larger group is sent alone.
_BATCH_GROUPS, _BATCH_BYTES = 32, 6 << 20

# Delay before a group is sent again after NO_ROOM.
_NO_ROOM_SECONDS = 0.5


class UploadRefused(Exception):
    """The broker rejected the group; the text is the reason."""


@dataclass(eq=False)
class _Put:
    run_id: str
    parts: list[Bytes]  # of the serialized PutGroup
    size: int
    outcome: asyncio.Future[int]


class UploadBatcher:
    """Uploads finished groups, in the order in which they finish."""

    def __init__(self, state: RolloutState, link: BrokerLink):
        self._state, self._link = state, link
        self._queue: deque[_Put] = deque()
        self._arrived = asyncio.Event()

    async def put(self, lease_id: str, group: experience_pb2.ExperienceGroup) -> int:
        """Upload a group, repeatedly while the outcome is NO_ROOM; return its PutOutcome.

        Raises:
            UploadRefused: the broker rejected the group, or it is too large.
        """
        loop = asyncio.get_running_loop()
        parts = put_group(lease_id, group.header, group.tensors, group.transcript)
        size = sum(map(len, parts))
        if size > LARGEST_GROUP:
            raise UploadRefused(f"the group has {size} bytes; allowed: at most {LARGEST_GROUP}, the size of a message")
        while True:
            item = _Put(self._state.run_id, parts, size, loop.create_future())
            self._queue.append(item)
            self._arrived.set()
            outcome = await item.outcome
            if outcome != broker_pb2.PUT_OUTCOME_NO_ROOM:
                return outcome
            log.debug("no room for a group", extra={"group": group.header.instance_id})
            await asyncio.sleep(_NO_ROOM_SECONDS)

    async def run(self) -> None:
        """Upload queued groups until cancelled."""
        while True:
            if batch := self._next_batch():
                await self._send(batch)
            else:
                self._arrived.clear()
                await self._arrived.wait()

    def _next_batch(self) -> list[_Put]:
        """Pop the groups of the next call from the queue; none if it is empty."""
        batch: list[_Put] = []
        size = 0
        while self._queue and len(batch) < _BATCH_GROUPS:
            item = self._queue[0]
            if batch and (size + item.size > _BATCH_BYTES or item.run_id != batch[0].run_id):
                break
            self._queue.popleft()
            if not item.outcome.cancelled():
                batch.append(item)
                size += item.size
        return batch

    async def _send(self, batch: list[_Put]) -> None:
        request = put_request(batch[0].run_id, [item.parts for item in batch])
        try:
            outcomes = (await self._link.call_with_retry(self._link.put_experience, request)).outcomes
        except grpc.RpcError as error:
            await self._refused(batch, error)
            return
        for item, outcome in zip(batch, outcomes, strict=True):
            if not item.outcome.done():
                item.outcome.set_result(outcome)

    async def _refused(self, batch: list[_Put], error: grpc.RpcError) -> None:
        """Handle a rejected call: send its groups one by one, to find the rejected ones."""
        if error.code() == grpc.StatusCode.NOT_FOUND:  # the run is gone
            for item in batch:
                if not item.outcome.done():
                    item.outcome.set_result(broker_pb2.PUT_OUTCOME_FINISHED)
        elif len(batch) > 1:
            for item in batch:
                await self._send([item])
        elif not batch[0].outcome.done():
            batch[0].outcome.set_exception(UploadRefused(describe(error)))
