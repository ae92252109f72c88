"""Whoever connects and does not speak gRPC as it should: the others are served, and nothing is left of it."""

import grpc
import pytest
from fuzz_broker import FuzzedBroker
from fuzz_target import resident_bytes
from hostile_connections import connect, hostile_conversations, idle_connections
from quartet.v1 import broker_pb2 as pb

PATH = "/quartet.v1.BrokerService/SubmitPrompts"
LIMIT = 64 << 20


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = FuzzedBroker(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


@pytest.mark.parametrize("wrong", hostile_conversations(PATH))
def test_what_is_not_grpc_is_let_go(broker, wrong):
    with connect(broker.server.address) as connection:
        connection.sendall(hostile_conversations(PATH)[wrong])
        broker.group_life("beside")
    assert broker.unchanged()


def test_half_open_and_idle_connections_keep_nobody_out(broker):
    with idle_connections(broker.server.address, 200):
        broker.group_life("beside-idlers")
    broker.group_life("after-idlers")
    assert broker.unchanged()


@pytest.mark.parametrize("rpc", ["SubmitPrompts", "PutExperience", "GetRun", "WatchRun"])
def test_a_message_over_the_limit_is_refused_unread(broker, rpc):
    before = resident_bytes(broker.server)
    for _ in range(3):
        error = broker.caller.raw(f"BrokerService.{rpc}", b"\x12" + bytes(LIMIT + 1000), timeout=60)
        assert error is not None and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error
        assert str(LIMIT) in error.details()
    assert broker.unchanged()
    assert resident_bytes(broker.server) - before < 2 * LIMIT


def test_a_message_just_below_the_limit_is_read_and_refused(broker):
    request = pb.PutExperienceRequest(run_id="no-such-run")
    group = request.groups.add(lease_id="0-0:q").group
    group.header.instance_id, group.header.purpose = "q", 1
    group.tensors = bytes(LIMIT - 1000)
    error = broker.caller.raw("BrokerService.PutExperience", request.SerializeToString(), timeout=60)
    assert error is not None and error.code() == grpc.StatusCode.NOT_FOUND, error
    assert broker.unchanged()
