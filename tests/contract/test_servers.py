"""What all four servers have in common: reflection, health, the token, limits, and patience with nonsense."""

import grpc
import pytest
from contract_stack import SMALL_MESSAGES
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from quartet_contract import cases_handshake
from quartet_contract.calls import CHEAP, OWNERS, RPCS, SERVICES

HANDSHAKE = "HandshakeService.Handshake"
AWAITED = {"broker": "", "reward": "", "environment": "", "rollout": "broker at", "trainer": "broker at"}
"""What each waits for while the others are absent."""

each_kind = pytest.mark.parametrize("kind", OWNERS)


def rpcs_of(kind: str) -> list[str]:
    return [rpc for rpc in RPCS if rpc.startswith((OWNERS[kind], "HandshakeService"))]


@pytest.fixture
def caller(stack, kind):
    """Return the server of a kind that works with the others."""
    return stack.callers()[OWNERS[kind]]


@each_kind
def test_reflection_lists_and_describes_its_services(caller, kind):
    database = ProtoReflectionDescriptorDatabase(caller.channel)
    ours = {SERVICES[OWNERS[kind]].full_name, SERVICES["HandshakeService"].full_name}
    assert set(database.get_services()) >= ours | {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    pool = DescriptorPool(database)
    for name in ours:
        described = FileDescriptorProto()
        pool.FindServiceByName(name).file.CopyToProto(described)
        own = FileDescriptorProto()
        SERVICES[name.rpartition(".")[2]].file.CopyToProto(own)
        assert described == own


@each_kind
def test_alone_it_is_healthy_and_says_what_it_waits_for(stack, kind):
    server = stack.alone[kind]
    caller = server.caller()
    for name in ("", SERVICES[OWNERS[kind]].full_name):
        assert server.health(name) == health_pb2.HealthCheckResponse.SERVING

    def says_so() -> bool:
        waiting = caller.call(HANDSHAKE, cases_handshake.GREETING).waiting_for
        return any(AWAITED[kind] in thing for thing in waiting) if AWAITED[kind] else not waiting

    server.wait_until(says_so, f"it waits for {AWAITED[kind] or 'nothing'}")  # some load a model first
    assert server.health() == health_pb2.HealthCheckResponse.SERVING


@each_kind
def test_a_message_over_the_limit_is_refused(stack, kind):
    caller = stack.alone[kind].caller()
    for rpc in (HANDSHAKE, CHEAP[kind][0]):
        error = caller.raw(rpc, b"\x12" + bytes(2 * SMALL_MESSAGES))
        assert error is not None and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caller.call(*CHEAP[kind]) is not None


@each_kind
def test_garbage_gets_a_status_and_breaks_nothing(caller, kind):
    for rpc in rpcs_of(kind):
        error = caller.raw(rpc, b"\xff" * 64)
        assert error is not None, f"{rpc} accepted garbage"
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, rpc
    assert caller.call(HANDSHAKE, cases_handshake.GREETING).instance_id
