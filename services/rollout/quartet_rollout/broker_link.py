"""Calls to the broker: a deadline on each, and word to people while it cannot be reached."""

from typing import Any

import grpc
from quartet.v1 import broker_pb2_grpc, common_pb2

from quartet_common.diagnosis import Peer
from quartet_common.errors import AWAY, retry_delay
from quartet_common.handshake import WaitingFor, handshake
from quartet_common.log import get_logger
from quartet_common.outage import Outage
from quartet_common.wire import put_experience

log = get_logger(__name__)

# The call may have reached nobody; nothing is known to be wrong with it.
TRANSIENT = AWAY | {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}

# A group that fills more than this fits no message (64 MiB with what surrounds it).
LARGEST_GROUP = 63 << 20


class BrokerLink:
    """The one channel to the broker."""

    def __init__(self, channel: grpc.aio.Channel, peer: Peer, waiting: WaitingFor, timeout: float):
        self._channel = channel
        self._stub = broker_pb2_grpc.BrokerServiceStub(channel)
        self._stub.PutExperience = put_experience(channel)
        self._peer = peer
        self._outage = Outage()
        self._waiting = waiting
        self._timeout = timeout

    async def introduce(self) -> None:
        """Shake hands, waiting until the broker is there. Raises grpc.RpcError if it refuses."""
        outage = Outage()
        while True:
            try:
                await handshake(self._channel, common_pb2.SERVICE_KIND_ROLLOUT)
            except grpc.RpcError as error:
                if error.code() not in TRANSIENT:
                    raise
                await self._away(error)
                await outage.wait()
            else:
                self._answered()
                return

    async def call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Make one call; PutExperience with the bytes of its request. Raises grpc.RpcError."""
        try:
            response = await getattr(self._stub, method)(request, timeout=timeout or self._timeout)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                await self._away(error)
            raise
        self._answered()
        return response

    async def insist(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Make a call that is safe to repeat until the broker answers it. Raises grpc.RpcError for what is final."""
        outage = Outage()
        while True:
            try:
                return await self.call(method, request, timeout)
            except grpc.RpcError as error:
                if error.code() not in TRANSIENT:
                    raise
                await outage.wait(retry_delay(error))

    async def _away(self, error: grpc.RpcError) -> None:
        self._outage.failed()
        self._waiting.add(str(self._peer))
        if self._outage.to_be_logged():
            log.warning("calling again: %s", await self._peer.explain_aside(error))

    def _answered(self) -> None:
        self._outage.over()
        self._waiting.discard(str(self._peer))
