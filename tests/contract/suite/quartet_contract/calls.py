"""Calls by the names in the protos, and what a refusal said."""

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from quartet.v1 import broker_pb2, common_pb2, environment_pb2, reward_pb2, rollout_pb2, trainer_pb2

SERVICES: dict[str, ServiceDescriptor] = {
    service.name: service
    for file in (common_pb2, broker_pb2, reward_pb2, environment_pb2, rollout_pb2, trainer_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
"""All services of the contract."""

OWNERS = {
    "broker": "BrokerService",
    "reward": "RewardService",
    "environment": "EnvironmentService",
    "rollout": "RolloutService",
    "trainer": "TrainerService",
}
"""Each kind of server and the service it has besides HandshakeService."""

RPCS = [f"{service.name}.{method.name}" for service in SERVICES.values() for method in service.methods]

CHEAP: dict[str, tuple[str, Message]] = {
    "broker": ("BrokerService.ListRuns", broker_pb2.ListRunsRequest()),
    "reward": ("RewardService.ListVerifiers", reward_pb2.ListVerifiersRequest()),
    "environment": ("EnvironmentService.ListEnvironments", environment_pb2.ListEnvironmentsRequest()),
    "rollout": ("RolloutService.GetStatus", rollout_pb2.RolloutServiceGetStatusRequest()),
    "trainer": ("TrainerService.GetStatus", trainer_pb2.TrainerServiceGetStatusRequest()),
}
"""By kind of server, a call that it answers in every state."""

# gRPC's own backoff grows to minutes: too long for servers that are just starting.
OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", -1),
]
SECONDS = 60.0


def method_of(rpc: str) -> MethodDescriptor:
    """Return the descriptor of "Service.Method"."""
    service, _, method = rpc.partition(".")
    return SERVICES[service].methods_by_name[method]


def is_idempotent(rpc: str) -> bool:
    """True if the proto says IDEMPOTENT or NO_SIDE_EFFECTS."""
    return method_of(rpc).GetOptions().idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN


class Caller:
    """A channel to one server; every call carries the token, if there is one."""

    def __init__(self, address: str, token: str = "", channel: grpc.Channel | None = None):
        """Plaintext with a token, or over a `channel` that brings its own security."""
        self.address = address
        self.channel = channel or grpc.insecure_channel(address, options=OPTIONS)
        self.metadata = [("authorization", f"Bearer {token}")] if token else []

    def call(self, rpc: str, request: Message | Sequence[Message], take: int = 0, timeout: float = SECONDS):
        """Make a call; return the answer, or the list of a stream's answers (the first `take`). Raises RpcError."""
        method = method_of(rpc)
        call = self.callable(method, lambda message: message.SerializeToString())
        given = request if isinstance(request, Message) else iter(request)
        answer = call(given, timeout=timeout, metadata=self.metadata)
        if not method.server_streaming:
            return answer
        with_end = list(_first(answer, take)) if take else list(answer)
        answer.cancel()
        return with_end

    def raw(self, rpc: str, data: bytes, timeout: float = SECONDS) -> grpc.RpcError | None:
        """Send bytes as the request; return the refusal, None if there was none, of a stream at its first answer."""
        method = method_of(rpc)
        call = self.callable(method, bytes)
        given = iter([data]) if method.client_streaming else data
        try:
            answer = call(given, timeout=timeout, metadata=self.metadata)
            if method.server_streaming:
                next(answer, None)
                answer.cancel()
        except grpc.RpcError as error:
            return error
        return None

    def callable(self, method: MethodDescriptor, serializer):
        """Return the call of an RPC, with another serializer of requests."""
        sides = ["stream" if side else "unary" for side in (method.client_streaming, method.server_streaming)]
        return getattr(self.channel, "_".join(sides))(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=serializer,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()


def _first(stream: Iterator[Message], count: int) -> Iterator[Message]:
    for _ in range(count):
        yield next(stream)


def details(error: grpc.RpcError) -> list[Message]:
    """Return the google.rpc details of a refusal, those of the kinds the contract uses."""
    known = {
        getattr(error_details_pb2, name).DESCRIPTOR.full_name: getattr(error_details_pb2, name)
        for name in error_details_pb2.DESCRIPTOR.message_types_by_name
    }
    found = []
    trailing: Any = error.trailing_metadata()  # pairs; types-grpcio has another class
    for key, value in trailing or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                message = known[detail.TypeName()]()
                detail.Unpack(message)
                found.append(message)
    return found


def without(message: Message, fields: Sequence[str]) -> Message:
    """Return a copy that lacks these fields, at any depth."""
    copy = type(message)()
    copy.CopyFrom(message)
    _strip(copy, frozenset(fields))
    return copy


def _strip(message: Message, fields: frozenset[str]) -> None:
    for field, value in message.ListFields():
        if field.name in fields:
            message.ClearField(field.name)
        elif field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        elif field.is_repeated:
            for part in value:
                _strip(part, fields)
        else:
            _strip(value, fields)
