"""Whoever connects and does not speak gRPC as it should: the others are served, and nothing is left of it."""

import pytest
from fuzz_broker import FuzzedBroker
from hostile_connections import connect, hostile_conversations, idle_connections

PATH = "/quartet.v1.BrokerService/SubmitPrompts"


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = FuzzedBroker(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


def test_what_is_not_grpc_is_let_go(broker):
    for said in hostile_conversations(PATH).values():
        with connect(broker.server.address) as connection:
            connection.sendall(said)
            broker.group_life("beside")
    assert broker.unchanged()


def test_half_open_and_idle_connections_keep_nobody_out(broker):
    with idle_connections(broker.server.address, 200):
        broker.group_life("beside-idlers")
    broker.group_life("after-idlers")
    assert broker.unchanged()
