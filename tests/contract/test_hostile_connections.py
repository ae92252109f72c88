"""Whoever connects and does not speak gRPC as it should: the others are served, and nothing is left of it."""

import threading
import time

import grpc
import pytest
from fuzz_broker import FuzzedBroker
from fuzz_target import resident_bytes
from hostile_connections import connect, hostile_conversations, idle_connections
from quartet.v1 import broker_pb2 as pb

from quartet_client.contract.calls import Caller

PATH = "/quartet.v1.BrokerService/SubmitPrompts"
LIMIT = 64 << 20


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = FuzzedBroker(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


class Bystander:
    """A client beside: calls all the time, and knows how long its slowest call took, in seconds."""

    def __init__(self, broker: FuzzedBroker):
        self._caller = Caller(broker.server.address)
        self._stop = threading.Event()
        self._called = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self.calls, self.slowest, self.errors = 0, 0.0, []

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._caller.call("BrokerService.GetRun", pb.GetRunRequest(run_id="fuzz"), timeout=20)
            except grpc.RpcError as error:
                self.errors.append(error)
            with self._called:
                self.calls, self.slowest = self.calls + 1, max(self.slowest, time.monotonic() - began)
                self._called.notify_all()

    def __enter__(self) -> "Bystander":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self._caller.close()

    def wait_for_calls(self, count: int) -> None:
        """Wait until some calls were made meanwhile."""
        with self._called:
            assert self._called.wait_for(lambda: self.calls >= count, timeout=60)

    def check(self) -> None:
        """Raise AssertionError unless all calls were answered."""
        assert not self.errors, self.errors[0]
        assert self.calls > 3 and self.slowest < 10


@pytest.mark.parametrize("wrong", hostile_conversations(PATH))
def test_what_is_not_grpc_is_let_go(broker, wrong):
    with Bystander(broker) as bystander, connect(broker.server.address) as connection:
        connection.sendall(hostile_conversations(PATH)[wrong])
        bystander.wait_for_calls(5)
    bystander.check()
    assert broker.unchanged()


def test_half_open_and_idle_connections_keep_nobody_out(broker):
    with idle_connections(broker.server.address, 200), Bystander(broker) as bystander:
        broker.group_life("beside-idlers")
    bystander.check()
    with Bystander(broker) as bystander:
        broker.group_life("after-idlers")
    bystander.check()
    assert broker.unchanged()


@pytest.mark.parametrize("rpc", ["SubmitPrompts", "PutExperience", "GetRun", "WatchRun"])
def test_a_message_over_the_limit_is_refused_unread(broker, rpc):
    before = resident_bytes(broker.server)
    with Bystander(broker) as bystander:
        for _ in range(3):
            error = broker.caller.raw(f"BrokerService.{rpc}", b"\x12" + bytes(LIMIT + 1000), timeout=60)
            assert error is not None and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error
            assert str(LIMIT) in error.details()
    bystander.check()
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
