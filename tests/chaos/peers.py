"""Several servers of one service, any of which may be away: calls go to each in turn, so that one group's life passes
through all of them."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from quartet_common.channel import connect
from quartet_common.config import SecuritySection
from quartet_common.errors import retry_delay

Answer = TypeVar("Answer")

CALL_SECONDS = 2.0  # an ordinary call's deadline
PATIENCE_SECONDS = 120.0  # for a service that is killed again and again
AVOIDED_SECONDS = 1.0  # a server that failed is left alone for so long, if there is another

# Nothing is known to be wrong with the call: it may be made again.
TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        # By the server: one that is stopped cancels what it has not begun. (Our own ends as asyncio.CancelledError.)
        grpc.StatusCode.CANCELLED,
    }
)

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Peers:
    """The servers of one service.

    Args:
        stub: the generated stub class.
        addresses: host:port of each.
    """

    def __init__(self, stub: Callable[[grpc.aio.Channel], Any], addresses: Sequence[str]):
        # In a network of namespaces no address is loopback; it is ours all the same.
        self._stubs = [stub(connect(address, SecuritySection(insecure=True))) for address in addresses]
        self._avoided = [0.0] * len(addresses)
        self._turn = itertools.cycle(range(len(addresses)))

    async def ask(self, call: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """Make a call of the next server's stub, once. Raises grpc.RpcError."""
        chosen = self._next()
        try:
            return await call(self._stubs[chosen])
        except grpc.RpcError as error:
            if error.code() in _AWAY:
                self._avoided[chosen] = asyncio.get_running_loop().time() + AVOIDED_SECONDS
            raise

    async def insist(self, call: Callable[[Any], Awaitable[Answer]], patience: float = PATIENCE_SECONDS) -> Answer:
        """Make a call that is safe to repeat until some server answers it. Raises grpc.RpcError for what is final."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + patience, 0.05
        while True:
            try:
                return await self.ask(call)
            except grpc.RpcError as error:
                if error.code() not in TRANSIENT or loop.time() > until:
                    raise
                await asyncio.sleep(min(max(pause, retry_delay(error) or 0.0), 1.0))
                pause = min(2 * pause, 0.5)

    async def unary(self, method: str, request: Any, timeout: float = CALL_SECONDS) -> Any:
        """Insist on a unary call, by its method's name."""
        return await self.insist(lambda stub: getattr(stub, method)(request, timeout=timeout))

    def _next(self) -> int:
        now = asyncio.get_running_loop().time()
        for chosen in itertools.islice(self._turn, len(self._stubs)):
            if self._avoided[chosen] <= now:
                return chosen
        return next(self._turn)
