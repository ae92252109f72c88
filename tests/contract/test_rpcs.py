"""Every RPC of the contract over a real socket, with good and with bad input; the cases are tables, cases_*.py."""

import subprocess

import cases_broker_prompts
import cases_broker_results
import cases_broker_runs
import cases_broker_training
import cases_handshake
import cases_reward
import cases_rollout
import cases_trainer
import grpc
import pytest
from contract_calls import OWNERS, RPCS, details, is_idempotent, method_of, without
from contract_cases import Bad, Case, Good, NoBadInput, Refused
from contract_stack import ENGINES
from contract_world import World
from google.protobuf.message import Message
from google.rpc import error_details_pb2

TABLES = (
    cases_handshake,
    cases_broker_runs,
    cases_broker_prompts,
    cases_broker_training,
    cases_broker_results,
    cases_reward,
    cases_rollout,
    cases_trainer,
)
CASES: list[Case] = [case for table in TABLES for case in table.CASES]


def places(case: Case) -> list[str]:
    """Where a case is tried: at each kind of server, with each engine, or at the one server there is."""
    service = case.rpc.partition(".")[0]
    if service == "HandshakeService":
        return list(OWNERS)
    if service == "RolloutService":
        return list(ENGINES) if isinstance(case, Good) else list(ENGINES[:1])
    return [""]


def parameters(*kinds: type) -> list:
    return [
        pytest.param(
            case,
            place,
            id="-".join(filter(None, (case.rpc.partition(".")[2], case.title.replace(" ", "_"), place))),
            marks=[pytest.mark.ends_a_service] if isinstance(case, Good) and case.last else [],
        )
        for case in CASES
        if isinstance(case, kinds)
        for place in places(case)
    ]


@pytest.fixture
def world(stack, place, case):
    """Return the case's world; what it left open at a rollout is closed behind it."""
    service = case.rpc.partition(".")[0]
    engine = place if place in ENGINES else ENGINES[0]
    callers = stack.callers(engine)
    if service == "HandshakeService":
        callers[service] = callers[OWNERS[place]]
        if place == "rollout":  # what it can do depends on its engine
            stack.wait_until_loaded(engine)
    weights = stack.weights(engine) if service == "RolloutService" else None
    world = World(callers, weights)
    yield world
    if weights is not None:
        weights.settle(world)


@pytest.mark.parametrize(("case", "place"), parameters(Good))
def test_good_input(stack, world, case: Good, place):
    request = case.request(world)
    first = world.call(case.rpc, request, take=case.take)
    case.check(world, first)
    if is_idempotent(case.rpc) and not case.once:
        again = world.call(case.rpc, request, take=case.take)
        if case.second is not None:
            case.second(world, again)
        else:
            assert comparable(again, case) == comparable(first, case)
    if case.last:
        assert_ends(stack.servers["trainer"].popen)


def comparable(answer: Message | list[Message], case: Good) -> Message | list[Message]:
    if isinstance(answer, list):
        return [without(part, case.volatile) for part in answer]
    return without(answer, case.volatile)


def assert_ends(process: subprocess.Popen) -> None:
    assert process.wait(60) == 0


@pytest.mark.parametrize(("case", "place"), parameters(Bad))
def test_bad_input(world, case: Bad, place):
    request = case.request(world)
    with pytest.raises(grpc.RpcError) as raised:
        world.call(case.rpc, request, server=case.server, take=case.take)
    error = raised.value
    assert error.code() == case.code, error.details()
    told = details(error)
    if case.code == grpc.StatusCode.INVALID_ARGUMENT:
        fields = [
            violation.field
            for detail in told
            if isinstance(detail, error_details_pb2.BadRequest)
            for violation in detail.field_violations
        ]
        assert any(case.names in field for field in fields), (fields, error.details())
    else:
        assert case.names in error.details()
    assert told, f"no google.rpc details come with: {error.details()}"
    assert "\n" not in error.details() and "Traceback" not in error.details()
    if case.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert any(isinstance(detail, error_details_pb2.RetryInfo) for detail in told)
    if case.code == grpc.StatusCode.FAILED_PRECONDITION:
        assert any(isinstance(detail, error_details_pb2.PreconditionFailure) for detail in told)


@pytest.mark.parametrize(("case", "place"), parameters(Refused))
def test_bad_input_that_is_answered(world, case: Refused, place):
    case.check(world, world.call(case.rpc, case.request(world)))


@pytest.mark.parametrize("rpc", RPCS)
def test_every_rpc_has_cases(rpc):
    kinds = {type(case) for case in CASES if case.rpc == rpc}
    assert Good in kinds, f"{rpc} has no good case"
    assert kinds & {Bad, Refused, NoBadInput}, f"{rpc} has no bad case, and no NoBadInput that says why"
    assert not (NoBadInput in kinds and kinds & {Bad, Refused}), f"{rpc} has a bad case and says that there is none"


def test_no_case_is_of_something_else():
    for case in CASES:
        assert case.rpc in RPCS, case.rpc
        if isinstance(case, NoBadInput):
            assert case.reason
        elif isinstance(case, Good):
            assert case.last <= bool(case.once), f"{case.rpc}: a call that ends the service cannot be made twice"
            assert not case.take or method_of(case.rpc).server_streaming
