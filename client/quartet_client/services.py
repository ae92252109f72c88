"""How the services are: health, handshake, what each says of itself."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.v1 import broker_pb2, common_pb2, reward_pb2, rollout_pb2, trainer_pb2

from quartet_client.connection import KINDS, Connections
from quartet_client.errors import QuartetError
from quartet_client.models import to_datetime
from quartet_client.runs import ServiceStatus
from quartet_common.handshake import handshake

_ADDRESS = re.compile(r"[\w.:\[\]-]+:\d{1,5}", re.ASCII)  # what a member says is somebody else's text
_PATIENCE = 3.0  # seconds for each question: a person waits for the answer

_STATUS_CALLS = {
    "broker": ("ListRuns", broker_pb2.ListRunsRequest(limit=1)),
    "reward": ("ListVerifiers", reward_pb2.ListVerifiersRequest()),
    "rollout": ("GetStatus", rollout_pb2.RolloutServiceGetStatusRequest()),
    "trainer": ("GetStatus", trainer_pb2.TrainerServiceGetStatusRequest()),
}


async def service_statuses(connections: Connections) -> list[ServiceStatus]:
    """Ask all four services at once, then the other rollouts of the newest run, which follow the one of [addresses].

    One that cannot be reached has its status say so.
    """
    broker, reward, rollout, trainer = await asyncio.gather(*(service_status(connections, kind) for kind in KINDS))
    others = await _other_rollouts(connections, broker, rollout.instance_id)
    rollouts = await asyncio.gather(*(service_status(connections, "rollout", address) for address in others))
    return [broker, reward, rollout, *rollouts, trainer]


async def _other_rollouts(connections: Connections, broker: ServiceStatus, known: str) -> list[str]:
    """Return the addresses of the newest run's live rollouts but the one with the instance id `known`."""
    runs = broker.details.get("runs")
    if not runs:
        return []
    request = broker_pb2.GetRunRequest(run_id=runs[0]["run_id"])
    try:
        members = (await connections.call("broker", "GetRun", request, timeout=_PATIENCE)).members
    except QuartetError:
        return []  # what is wrong with the broker stands in its own status
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
        details, error = await _details(connections, kind, address), ""
    except QuartetError as failure:
        return ServiceStatus(kind, address, "unreachable", error=str(failure))
    return ServiceStatus(
        kind=kind,
        address=address,
        health=health,
        instance_id=hello.instance_id,
        build=hello.build,
        started_at=to_datetime(hello.started_at),
        waiting_for=tuple(hello.waiting_for),
        capabilities=tuple(hello.capabilities),
        libraries=dict(hello.libraries),
        details=details,
        error=error,
        idle_fraction=hello.idle_fraction if hello.HasField("idle_fraction") else None,
    )


async def _health(channel: grpc.aio.Channel) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status).lower()


async def _details(connections: Connections, kind: str, address: str) -> Mapping[str, Any]:
    """Return what a service says of itself; {"error": sentence} if it cannot say it now (the broker without Redis)."""
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
