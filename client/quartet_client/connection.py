"""Channels to the services: opened when first used, each with one handshake."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, reward_pb2_grpc, rollout_pb2_grpc, trainer_pb2_grpc

from quartet_client.errors import QuartetError
from quartet_client.models import enum_name
from quartet_common.channel import connect
from quartet_common.config import AddressesSection, SecuritySection
from quartet_common.diagnosis import Peer
from quartet_common.errors import ContractError, missing_kind, retry_delay
from quartet_common.handshake import handshake

_STUBS = {
    "broker": broker_pb2_grpc.BrokerServiceStub,
    "reward": reward_pb2_grpc.RewardServiceStub,
    "rollout": rollout_pb2_grpc.RolloutServiceStub,
    "trainer": trainer_pb2_grpc.TrainerServiceStub,
}
KINDS = tuple(_STUBS)
_RUNS_NAMED = 8  # of those there are, in the error about one that does not exist


class Connections:
    """The channels of one client. Use it in one event loop only."""

    def __init__(self, addresses: AddressesSection, security: SecuritySection, timeout: float):
        self.addresses = addresses
        self.timeout = timeout
        self._security = security
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._introduced: set[tuple[str, str]] = set()

    def address(self, kind: str) -> str:
        """Return the configured address of a service."""
        return getattr(self.addresses, kind)

    def peer(self, kind: str, address: str | None = None) -> Peer:
        """Return who is called, for what is said of failures."""
        return Peer(kind, address or self.address(kind), self._security)

    @asynccontextmanager
    async def errors(self, kind: str, address: str | None = None) -> AsyncIterator[None]:
        """Turn errors of calls to a service into QuartetError; that of an unknown run names those there are."""
        try:
            yield
        except ContractError as error:
            raise QuartetError(error.message, error.code) from error
        except grpc.RpcError as error:
            message = await self.peer(kind, address).explain_aside(error)
            if kind == "broker" and missing_kind(error) == "run":
                message += await self._runs_there_are()
            raise QuartetError(message, error.code(), retry_delay(error)) from error

    async def _runs_there_are(self) -> str:
        request = broker_pb2.ListRunsRequest(limit=_RUNS_NAMED)
        try:
            found = await self.call("broker", "ListRuns", request)
        except QuartetError:
            return ""
        names = ", ".join(run.spec.run_id for run in found.runs)
        more = ", …" if found.next_page_token else ""
        return f"; the runs there are: {names}{more}" if names else "; there are no runs"

    def channel(self, kind: str, address: str) -> grpc.aio.Channel:
        """Return the channel to a service at an address."""
        if (kind, address) not in self._channels:
            self._channels[kind, address] = connect(address, self._security, service=kind)
        return self._channels[kind, address]

    async def stub(self, kind: str, address: str | None = None) -> Any:
        """Return the stub of a service after its handshake.

        Raises:
            QuartetError: it cannot be reached, is another service, or speaks another contract.
        """
        address = address or self.address(kind)
        channel = self.channel(kind, address)
        if (kind, address) not in self._introduced:
            await self._introduce(kind, address, channel)
            self._introduced.add((kind, address))
        return _STUBS[kind](channel)

    async def _introduce(self, kind: str, address: str, channel: grpc.aio.Channel) -> None:
        async with self.errors(kind, address):
            answer = await handshake(channel, common_pb2.SERVICE_KIND_CLIENT, timeout=self.timeout)
        came = enum_name(common_pb2.ServiceKind, answer.service)
        if came != kind:
            raise QuartetError(f"{address} was taken for the {kind}, but a {came} answers there; check [addresses]")

    async def call(
        self, kind: str, method: str, request: Any, *, address: str | None = None, timeout: float = 0
    ) -> Any:
        """Call a unary RPC with a deadline (seconds; 0: the client's own). Raises QuartetError."""
        stub = await self.stub(kind, address)
        async with self.errors(kind, address):
            return await getattr(stub, method)(request, timeout=timeout or self.timeout)

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = self._channels, {}
        self._introduced.clear()
        for channel in channels.values():
            await channel.close(grace=None)
