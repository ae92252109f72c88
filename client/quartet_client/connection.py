"""Channels to the services, with a handshake at first use; retries of broker calls; the status of each service."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    common_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

from quartet_client.errors import InputError, QuartetError
from quartet_client.models import ServiceStatus, enum_name
from quartet_common.channel import connect
from quartet_common.config import AddressesSection, ConfigError, SecuritySection, split_address
from quartet_common.diagnosis import Peer
from quartet_common.errors import AWAY, ContractError, missing_kind, retry_delay
from quartet_common.handshake import handshake
from quartet_common.outage import Outage as AnyOutage

_STUBS = {
    "broker": broker_pb2_grpc.BrokerServiceStub,
    "reward": reward_pb2_grpc.RewardServiceStub,
    "rollout": rollout_pb2_grpc.RolloutServiceStub,
    "trainer": trainer_pb2_grpc.TrainerServiceStub,
}
KINDS = tuple(_STUBS)
_RUNS_NAMED = 8  # in the error about a run that does not exist


class Connections:
    """The channels of one client. Use it in one event loop only."""

    def __init__(self, addresses: AddressesSection, security: SecuritySection, timeout: float):
        self.addresses = addresses
        self.timeout = timeout
        self._security = security
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._checked: set[tuple[str, str]] = set()

    def address(self, kind: str) -> str:
        return getattr(self.addresses, kind)

    @asynccontextmanager
    async def errors(self, kind: str, address: str | None = None) -> AsyncIterator[None]:
        """Turn errors of calls to a service into QuartetError; the error about an unknown run names existing ones."""
        try:
            yield
        except ContractError as error:
            raise QuartetError(error.message, error.code) from error
        except grpc.RpcError as error:
            peer = Peer(kind, address or self.address(kind), self._security)
            message = await peer.explain_aside(error)
            if kind == "broker" and missing_kind(error) == "run":
                message += await self._existing_runs()
            raise QuartetError(message, error.code(), retry_delay(error)) from error

    async def _existing_runs(self) -> str:
        request = broker_pb2.ListRunsRequest(limit=_RUNS_NAMED)
        try:
            found = await self.call("broker", "ListRuns", request)
        except QuartetError:
            return ""
        names = ", ".join(run.spec.run_id for run in found.runs)
        more = ", …" if found.next_page_token else ""
        return f"; the runs there are: {names}{more}" if names else "; there are no runs"

    def channel(self, kind: str, address: str) -> grpc.aio.Channel:
        if (kind, address) not in self._channels:
            try:
                split_address(address)
                self._channels[kind, address] = connect(address, self._security, service=kind)
            except (ConfigError, ValueError) as error:
                raise InputError("; ".join(getattr(error, "problems", (str(error),)))) from error
        return self._channels[kind, address]

    async def stub(self, kind: str, address: str | None = None) -> Any:
        """Return the stub of a service after its handshake.

        Raises:
            InputError: the address, or a file of the TLS configuration, cannot be used.
            QuartetError: it cannot be reached, is another service, or speaks another contract.
        """
        address = address or self.address(kind)
        channel = self.channel(kind, address)
        if (kind, address) not in self._checked:
            await self._check(kind, address, channel)
            self._checked.add((kind, address))
        return _STUBS[kind](channel)

    async def _check(self, kind: str, address: str, channel: grpc.aio.Channel) -> None:
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
        channels, self._channels = self._channels, {}
        self._checked.clear()
        for channel in channels.values():
            await channel.close(grace=None)


class Outage(AnyOutage):
    """Retries calls while the broker is away.

    Args:
        patience: seconds without an answer after which to give up.
        what: what the call is for, for the error.
        stop: set it to end a wait.
    """

    def __init__(self, patience: float, what: str, stop: asyncio.Event | None = None) -> None:
        super().__init__(patience, first=0.5)
        self._what = what
        self._stop = stop or asyncio.Event()

    async def wait_or_raise(self, error: QuartetError) -> None:
        """Wait until the next attempt; raise the error if the broker refused the call or is away for too long."""
        if error.code not in AWAY:
            raise error
        pause = self.failed(error.retry_after)
        if self.given_up:
            waited = f" (away for {self.seconds:.0f} s)" if self.patience else ""
            text = f"{self._what}: {error}{waited}"
            raise QuartetError(text, error.code, error.retry_after) from error
        await wait_for(self._stop, pause)


async def until_first(*works: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines concurrently until the first ends, raise its exception if any, and cancel the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def repeatedly(stop: asyncio.Event, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Call `work`, with pauses of `seconds`, until `stop` is set or it raises."""
    while not stop.is_set():
        await work()
        await wait_for(stop, seconds)


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, or `seconds` have passed. Return True if it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


_ADDRESS = re.compile(r"[\w.:\[\]-]+:\d{1,5}", re.ASCII)  # members report their own address: untrusted text
_PATIENCE = 3.0  # seconds per call: a person waits for the answer

_STATUS_CALLS = {
    "broker": ("ListRuns", broker_pb2.ListRunsRequest(limit=1)),
    "reward": ("ListVerifiers", reward_pb2.ListVerifiersRequest()),
    "rollout": ("GetStatus", rollout_pb2.RolloutServiceGetStatusRequest()),
    "trainer": ("GetStatus", trainer_pb2.TrainerServiceGetStatusRequest()),
}


async def service_statuses(connections: Connections) -> list[ServiceStatus]:
    """Query the four services concurrently, then the newest run's other rollouts, listed after that of [addresses].

    The status of a service that cannot be reached has the error.
    """
    broker, reward, rollout, trainer = await asyncio.gather(*(service_status(connections, kind) for kind in KINDS))
    others = await _other_rollouts(connections, broker, rollout.instance_id)
    rollouts = await asyncio.gather(*(service_status(connections, "rollout", address) for address in others))
    return [broker, reward, rollout, *rollouts, trainer]


async def _other_rollouts(connections: Connections, broker: ServiceStatus, known: str) -> list[str]:
    """Return the addresses of the newest run's live rollouts, except that with the instance id `known`."""
    runs = broker.details.get("runs")
    if not runs:
        return []
    request = broker_pb2.GetRunRequest(run_id=runs[0]["run_id"])
    try:
        members = (await connections.call("broker", "GetRun", request, timeout=_PATIENCE)).members
    except QuartetError:
        return []  # the broker's own status has the error
    rollouts = [member for member in members if member.kind == common_pb2.SERVICE_KIND_ROLLOUT]
    return [member.address for member in rollouts if member.instance_id != known and _ADDRESS.fullmatch(member.address)]


async def service_status(connections: Connections, kind: str, address: str = "") -> ServiceStatus:
    """Ask one service, by default at its configured address, for its health, handshake and status."""
    address = address or connections.address(kind)
    channel = connections.channel(kind, address)
    try:
        async with connections.errors(kind, address):
            health = await _health(channel)
            hello = await handshake(channel, common_pb2.SERVICE_KIND_CLIENT, timeout=_PATIENCE)
        details = await _details(connections, kind, address)
    except QuartetError as failure:
        return ServiceStatus(kind, address, "unreachable", error=str(failure))
    return ServiceStatus.from_proto(hello, kind=kind, address=address, health=health, details=details)


async def _health(channel: grpc.aio.Channel) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status).lower()


async def _details(connections: Connections, kind: str, address: str) -> Mapping[str, Any]:
    """Return the service's own status; {"error": sentence} if the call fails (the broker without Redis)."""
    method, request = _STATUS_CALLS[kind]
    try:
        answer = await connections.call(kind, method, request, address=address, timeout=_PATIENCE)
    except QuartetError as error:
        return {"error": str(error)}
    if kind == "reward":
        return {"verifiers": [verifier.name for verifier in answer.verifiers]}
    if kind == "broker":
        return {"runs": [_run_summary(run) for run in answer.runs]}
    return MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _run_summary(run: broker_pb2.Run) -> dict[str, object]:
    stats = MessageToDict(run.stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {
        "run_id": run.spec.run_id,
        "state": broker_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower(),
        "policy_version": run.policy_version,
        "stats": {name: int(count) for name, count in stats.items()},
    }
