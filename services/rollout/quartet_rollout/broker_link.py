"""Calls to the broker: a deadline on each, and word to people while it cannot be reached."""

import asyncio
from typing import Any

import grpc
from quartet.v1 import broker_pb2_grpc, common_pb2

from quartet_common.errors import AWAY, describe, retry_delay
from quartet_common.handshake import WaitingFor, handshake
from quartet_common.log import get_logger
from quartet_common.wire import put_experience

log = get_logger(__name__)

# The call may have reached nobody; nothing is known to be wrong with it.
TRANSIENT = AWAY | {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}


class Backoff:
    """Waits that double from `first` to `longest` seconds."""

    def __init__(self, first: float = 0.1, longest: float = 2.0) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def reset(self) -> None:
        """Begin again with the first wait."""
        self._next = self._first

    async def wait(self, suggested: float | None = None) -> None:
        """Wait for the next time, or for as long as the server suggested if that is longer."""
        delay, self._next = self._next, min(self._next * 2, self._longest)
        await asyncio.sleep(max(delay, suggested or 0.0))


class BrokerLink:
    """The one channel to the broker."""

    def __init__(self, channel: grpc.aio.Channel, address: str, waiting: WaitingFor, timeout: float):
        self._channel = channel
        self._stub = broker_pb2_grpc.BrokerServiceStub(channel)
        self._stub.PutExperience = put_experience(channel)
        self._thing = f"broker at {address}"
        self._waiting = waiting
        self._timeout = timeout

    async def introduce(self) -> None:
        """Shake hands, waiting until the broker is there. Raises grpc.RpcError if it refuses."""
        backoff = Backoff()
        while True:
            try:
                await handshake(self._channel, common_pb2.SERVICE_KIND_ROLLOUT)
            except grpc.RpcError as error:
                if error.code() not in TRANSIENT:
                    raise
                self._away()
                await backoff.wait()
            else:
                self._waiting.discard(self._thing)
                return

    async def call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Make one call; PutExperience with the bytes of its request. Raises grpc.RpcError."""
        try:
            response = await getattr(self._stub, method)(request, timeout=timeout or self._timeout)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                self._away()
                log.debug("broker unavailable", extra={"method": method, "reason": describe(error)})
            raise
        self._waiting.discard(self._thing)
        return response

    async def insist(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Make a call that is safe to repeat until the broker answers it. Raises grpc.RpcError for what is final."""
        backoff = Backoff()
        while True:
            try:
                return await self.call(method, request, timeout)
            except grpc.RpcError as error:
                if error.code() not in TRANSIENT:
                    raise
                await backoff.wait(retry_delay(error))

    def _away(self) -> None:
        self._waiting.add(self._thing)
