"""Makes a case's call and judges the answer."""

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from quartet_contract.calls import details, is_idempotent, without
from quartet_contract.cases import Bad, Good, Tried
from quartet_contract.world import World


def judge(world: World, case: Tried) -> None:
    """Raise AssertionError, with what came, unless the call is answered or refused as the case says."""
    if isinstance(case, Good):
        _judge_good(world, case)
    elif isinstance(case, Bad):
        _judge_bad(world, case)
    else:  # it succeeds, and its answer says what is wrong
        case.check(world, world.call(case.rpc, case.request(world)))


def _judge_good(world: World, case: Good) -> None:
    """The call succeeds; made again, if it is idempotent, it is answered alike."""
    request = case.request(world)
    first = world.call(case.rpc, request, take=case.take)
    case.check(world, first)
    if is_idempotent(case.rpc) and not case.once:
        again = world.call(case.rpc, request, take=case.take)
        if case.second is not None:
            case.second(world, again)
        else:
            assert comparable(again, case) == comparable(first, case)


def comparable(answer: Message | list[Message], case: Good) -> Message | list[Message]:
    """Return an answer without what may differ between two calls."""
    if isinstance(answer, list):
        return [without(part, case.volatile) for part in answer]
    return without(answer, case.volatile)


def _judge_bad(world: World, case: Bad) -> None:
    """The call is refused with the right code, in one line that names what is wrong, with google.rpc details."""
    request = case.request(world)
    try:
        answer = world.call(case.rpc, request, server=case.server, take=case.take)
    except grpc.RpcError as refusal:
        error = refusal
    else:
        raise AssertionError(f"was answered, not refused with {case.code.name}: {_short(answer)}")
    assert error.code() == case.code, f"refused with {error.code().name}: {error.details()}"
    told, said = details(error), error.details() or ""
    if case.code == grpc.StatusCode.INVALID_ARGUMENT:
        fields = [
            violation.field
            for detail in told
            if isinstance(detail, error_details_pb2.BadRequest)
            for violation in detail.field_violations
        ]
        assert any(case.names in field for field in fields), (fields, said)
    else:
        assert case.names in said
    assert told, f"no google.rpc details come with: {said}"
    assert "\n" not in said and "Traceback" not in said
    if case.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert any(isinstance(detail, error_details_pb2.RetryInfo) for detail in told)
    if case.code == grpc.StatusCode.FAILED_PRECONDITION:
        assert any(isinstance(detail, error_details_pb2.PreconditionFailure) for detail in told)


def _short(answer: Message | list[Message]) -> str:
    text = str(answer).replace("\n", " ")
    return text if len(text) <= 300 else f"{text[:300]} …"
