"""Channels to the services, with a handshake at first use; retries of broker calls; the status of each service."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    common_pb2,
    environment_pb2,
    environment_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

from quartet_client.errors import InputError, QuartetError
from quartet_client.from_proto import enum_name
from quartet_client.models import ServiceStatus
from quartet_common.channel import connect
from quartet_common.config import AddressesSection, ConfigError, SecuritySection, split_address
from quartet_common.diagnosis import Peer
from quartet_common.errors import AWAY, ContractError, missing_kind, retry_delay
from quartet_common.handshake import handshake
from quartet_common.outage import Outage

KINDS = ("broker", "reward", "rollout", "trainer")
ALL_KINDS = (*KINDS, "environment")
"""With the optional one."""
_RUNS_NAMED = 8  # in the error about a run that does not exist

Stub = TypeVar("Stub")
Answer = TypeVar("Answer")


class Service(Generic[Stub]):
    """One service at one address: its stub, a handshake before the first call, and the errors of calls."""

    def __init__(
        self,
        kind: str,
        address: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        security: SecuritySection,
        timeout: float,
    ):
        self.kind, self.address, self.timeout = kind, address, timeout
        self._stub_of, self._security = stub, security
        self._known = False

    @cached_property
    def channel(self) -> grpc.aio.Channel:
        """Raises InputError if the address, or a file of the TLS configuration, cannot be used."""
        try:
            split_address(self.address)
            return connect(self.address, self._security, service=self.kind)
        except (ConfigError, ValueError) as error:
            raise InputError("; ".join(getattr(error, "problems", (str(error),)))) from error

    @cached_property
    def stub(self) -> Stub:
        """The contract's methods; make their calls by `call`, or, after `greet`, within `errors`."""
        return self._stub_of(self.channel)

    async def call(self, rpc: Callable[..., Awaitable[Answer]], request: Message, timeout: float = 0) -> Answer:
        """Call a unary method of `stub` with a deadline (seconds; 0: the client's own).

        Raises:
            QuartetError: it refuses, cannot be reached, is another service, or speaks another contract.
        """
        async with self.errors():
            await self.greet()
            return await rpc(request, timeout=timeout or self.timeout)

    @asynccontextmanager
    async def errors(self) -> AsyncIterator[None]:
        """Turn errors of calls into QuartetError; the error about an unknown run names existing ones."""
        try:
            yield
        except ContractError as error:
            raise QuartetError(error.message, error.code) from error
        except grpc.RpcError as error:
            message = await Peer(self.kind, self.address, self._security).explain_aside(error)
            if self.kind == "broker" and missing_kind(error) == "run":
                message += await self._existing_runs()
            raise QuartetError(message, error.code(), retry_delay(error)) from error

    async def greet(self) -> None:
        """Handshake, once. Raises QuartetError if it is another service."""
        if self._known:
            return
        answer = await handshake(self.channel, common_pb2.SERVICE_KIND_CLIENT, timeout=self.timeout)
        came = enum_name(common_pb2.ServiceKind, answer.service)
        if came != self.kind:
            raise QuartetError(
                f"{self.address} was taken for the {self.kind}, but a {came} answers there; check [addresses]"
            )
        self._known = True

    async def require(self, capability: str) -> None:
        """Raise QuartetError if the service lacks a capability."""
        async with self.errors():
            await handshake(self.channel, common_pb2.SERVICE_KIND_CLIENT, [capability], self.timeout)

    async def _existing_runs(self) -> str:
        request = broker_pb2.ListRunsRequest(limit=_RUNS_NAMED)
        try:
            found = await self.call(broker_pb2_grpc.BrokerServiceStub(self.channel).ListRuns, request)
        except QuartetError:
            return ""
        names = ", ".join(run.spec.run_id for run in found.runs)
        more = ", …" if found.next_page_token else ""
        return f"; the runs there are: {names}{more}" if names else "; there are no runs"

    async def close(self) -> None:
        """Close the channel, if there is one."""
        if "channel" in vars(self):
            await self.channel.close(grace=None)


class Connections:
    """The services of one client. Use it in one event loop only."""

    broker: Service[broker_pb2_grpc.BrokerServiceAsyncStub]
    reward: Service[reward_pb2_grpc.RewardServiceAsyncStub]
    rollout: Service[rollout_pb2_grpc.RolloutServiceAsyncStub]
    trainer: Service[trainer_pb2_grpc.TrainerServiceAsyncStub]
    environment: Service[environment_pb2_grpc.EnvironmentServiceAsyncStub]

    def __init__(self, addresses: AddressesSection, security: SecuritySection, timeout: float):
        self.timeout = timeout
        common = (security, timeout)
        self.broker = Service("broker", addresses.broker, broker_pb2_grpc.BrokerServiceStub, *common)
        self.reward = Service("reward", addresses.reward, reward_pb2_grpc.RewardServiceStub, *common)
        self.rollout = Service("rollout", addresses.rollout, rollout_pb2_grpc.RolloutServiceStub, *common)
        self.trainer = Service("trainer", addresses.trainer, trainer_pb2_grpc.TrainerServiceStub, *common)
        stub = environment_pb2_grpc.EnvironmentServiceStub
        self.environment = Service("environment", addresses.environment, stub, *common)
        self.uses_environments = "environment" in addresses.model_fields_set
        """Whether an address is given for the environment service, which is optional."""
        self._others: dict[str, Service[rollout_pb2_grpc.RolloutServiceAsyncStub]] = {}
        self._security = security

    def rollout_at(self, address: str) -> Service[rollout_pb2_grpc.RolloutServiceAsyncStub]:
        """Return the rollout at an address; "": that of [addresses]."""
        if address in ("", self.rollout.address):
            return self.rollout
        if address not in self._others:
            stub = rollout_pb2_grpc.RolloutServiceStub
            self._others[address] = Service("rollout", address, stub, self._security, self.timeout)
        return self._others[address]

    async def close(self) -> None:
        """Close the channels."""
        own = (self.broker, self.reward, self.rollout, self.trainer, self.environment)
        for service in (*own, *self._others.values()):
            await service.close()


class BrokerOutage(Outage):
    """Retries calls while the broker is away.

    Args:
        patience: seconds without an answer after which to give up.
        what: what the call is for, for the error.
        stop: set it to end a wait.
    """

    def __init__(self, patience: float, what: str, stop: asyncio.Event | None = None) -> None:
        super().__init__(patience)
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


async def repeatedly(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Call `work`, with pauses of `seconds`, until it raises."""
    while True:
        await work()
        await asyncio.sleep(seconds)


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


async def service_statuses(connections: Connections) -> list[ServiceStatus]:
    """Query the services concurrently, then the newest run's other rollouts, listed after that of [addresses].

    The status of a service that cannot be reached has the error. The environment service is left out if it cannot be
    reached where it is not configured.
    """
    found = await asyncio.gather(*(service_status(connections, kind) for kind in ALL_KINDS))
    broker, reward, rollout, trainer, environment = found
    others = await _other_rollouts(connections, broker, rollout.instance_id)
    asked = (_status(connections.rollout_at(name), _rollout_details) for name in others)
    optional = [environment] if connections.uses_environments or environment.health != "unreachable" else []
    return [broker, reward, rollout, *await asyncio.gather(*asked), trainer, *optional]


async def _other_rollouts(connections: Connections, broker: ServiceStatus, known: str) -> list[str]:
    """Return the addresses of the newest run's live rollouts, except that with the instance id `known`."""
    runs = broker.details.get("runs")
    if not runs:
        return []
    request = broker_pb2.GetRunRequest(run_id=runs[0]["run_id"])
    try:
        found = await connections.broker.call(connections.broker.stub.GetRun, request, _PATIENCE)
    except QuartetError:
        return []  # the broker's own status has the error
    rollouts = [member for member in found.members if member.kind == common_pb2.SERVICE_KIND_ROLLOUT]
    return [member.address for member in rollouts if member.instance_id != known and _ADDRESS.fullmatch(member.address)]


async def service_status(connections: Connections, kind: str) -> ServiceStatus:
    """Ask a service of [addresses] for its health, handshake and status."""
    match kind:
        case "broker":
            return await _status(connections.broker, _broker_details)
        case "reward":
            return await _status(connections.reward, _reward_details)
        case "rollout":
            return await _status(connections.rollout, _rollout_details)
        case "environment":
            return await _status(connections.environment, _environment_details)
        case _:
            return await _status(connections.trainer, _trainer_details)


async def _status(service: Service[Any], details: Callable[[Service[Any]], Awaitable[dict[str, Any]]]) -> ServiceStatus:
    """Ask a service; if its status call fails (the broker without Redis), the details are that error's sentence."""
    try:
        async with service.errors():
            health = await _health(service.channel)
            hello = await handshake(service.channel, common_pb2.SERVICE_KIND_CLIENT, timeout=_PATIENCE)
    except QuartetError as failure:
        return ServiceStatus(service.kind, service.address, "unreachable", error=str(failure))
    try:
        found = await details(service)
    except QuartetError as error:
        found = {"error": str(error)}
    return ServiceStatus.from_proto(hello, kind=service.kind, address=service.address, health=health, details=found)


async def _health(channel: grpc.aio.Channel) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status).lower()


async def _broker_details(broker: Service[broker_pb2_grpc.BrokerServiceAsyncStub]) -> dict[str, Any]:
    answer = await broker.call(broker.stub.ListRuns, broker_pb2.ListRunsRequest(limit=1), _PATIENCE)
    return {"runs": [_run_summary(run) for run in answer.runs]}


async def _reward_details(reward: Service[reward_pb2_grpc.RewardServiceAsyncStub]) -> dict[str, Any]:
    answer = await reward.call(reward.stub.ListVerifiers, reward_pb2.ListVerifiersRequest(), _PATIENCE)
    return {"verifiers": [verifier.name for verifier in answer.verifiers]}


async def _environment_details(
    environment: Service[environment_pb2_grpc.EnvironmentServiceAsyncStub],
) -> dict[str, Any]:
    request = environment_pb2.ListEnvironmentsRequest()
    answer = await environment.call(environment.stub.ListEnvironments, request, _PATIENCE)
    return {"environments": [one.name for one in answer.environments]}


async def _rollout_details(rollout: Service[rollout_pb2_grpc.RolloutServiceAsyncStub]) -> dict[str, Any]:
    return _fields(await rollout.call(rollout.stub.GetStatus, rollout_pb2.RolloutServiceGetStatusRequest(), _PATIENCE))


async def _trainer_details(trainer: Service[trainer_pb2_grpc.TrainerServiceAsyncStub]) -> dict[str, Any]:
    return _fields(await trainer.call(trainer.stub.GetStatus, trainer_pb2.TrainerServiceGetStatusRequest(), _PATIENCE))


def _fields(status: Message) -> dict[str, Any]:
    return MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _run_summary(run: broker_pb2.Run) -> dict[str, object]:
    return {
        "run_id": run.spec.run_id,
        "state": enum_name(broker_pb2.RunState, run.state),
        "policy_version": run.policy_version,
        "stats": {name: int(count) for name, count in _fields(run.stats).items()},
    }
