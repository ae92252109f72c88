"""Calls several servers of one service in turn, any of which may be down, so that each handles part of a group's
calls."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import grpc

from quartet_common.channel import connect
from quartet_common.config import SecuritySection
from quartet_common.errors import retry_delay

Answer = TypeVar("Answer")

CALL_SECONDS = 2.0  # an ordinary call's deadline
PATIENCE_SECONDS = 120.0  # for a service that is killed repeatedly
AVOIDED_SECONDS = 1.0  # after a failure a server is not used for this time, if there is another

# CANCELLED comes from a server that shuts down. (Cancellation by the caller raises asyncio.CancelledError.)
_AWAY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
# These calls may be retried.
TRANSIENT = _AWAY | {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}


class Peers:
    """The servers of one service.

    Args:
        stub: the generated stub class.
        messages: the generated module of its requests.
        addresses: host:port of each.
        always: fields of every request.
    """

    def __init__(self, stub: Callable, messages: ModuleType, addresses: Sequence[str], **always: object):
        # Plaintext: in the network form no address is loopback.
        self._stubs = [stub(connect(address, SecuritySection(insecure=True))) for address in addresses]
        self._messages, self._always = messages, always
        self._avoided = [0.0] * len(addresses)
        self._turn = itertools.cycle(range(len(addresses)))

    async def call(
        self, method: str, *, timeout: float = CALL_SECONDS, patience: float = PATIENCE_SECONDS, **fields: object
    ) -> Any:
        """Make a unary call by its name, retried for `patience` seconds. Raises grpc.RpcError."""
        request = self.request(method, **fields)
        return await self.call_with_retry(lambda stub: getattr(stub, method)(request, timeout=timeout), patience)

    def request(self, method: str, **fields: object) -> Any:
        return getattr(self._messages, f"{method}Request")(**self._always, **fields)

    async def call_with_retry(
        self, call: Callable[[Any], Awaitable[Answer]], patience: float = PATIENCE_SECONDS
    ) -> Answer:
        """Make a call with the next server's stub, and retry TRANSIENT errors with others. Raises grpc.RpcError."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + patience, 0.05
        while True:
            chosen = self._next()
            try:
                return await call(self._stubs[chosen])
            except grpc.RpcError as error:
                if error.code() in _AWAY:
                    self._avoided[chosen] = loop.time() + AVOIDED_SECONDS
                if error.code() not in TRANSIENT or loop.time() >= until:
                    raise
                await asyncio.sleep(min(max(pause, retry_delay(error) or 0.0), 1.0))
                pause = min(2 * pause, 0.5)

    def _next(self) -> int:
        now = asyncio.get_running_loop().time()
        for chosen in itertools.islice(self._turn, len(self._stubs)):
            if self._avoided[chosen] <= now:
                return chosen
        return next(self._turn)
