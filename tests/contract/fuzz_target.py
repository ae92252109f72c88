"""A server to send bad messages to: what came back, and whether a refusal left anything behind."""

import re

import grpc
import psutil
from google.protobuf.descriptor import Descriptor
from google.rpc import error_details_pb2
from servers_under_test import Server

from quartet_contract.calls import Caller, details, method_of

Code = grpc.StatusCode

REFUSALS = {
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.ALREADY_EXISTS,
    Code.FAILED_PRECONDITION,
    Code.RESOURCE_EXHAUSTED,
    Code.ABORTED,
}
"""What a service in good health may say to a bad call."""

UNARY_SECONDS, STREAM_SECONDS = 20.0, 0.15


def send(caller: Caller, rpc: str, data: bytes) -> grpc.RpcError | None:
    """Send bytes as a request; return what was raised. A stream that has no message yet is not waited for."""
    return caller.raw(rpc, data, STREAM_SECONDS if method_of(rpc).server_streaming else UNARY_SECONDS)


def refused(error: grpc.RpcError | None) -> bool:
    """True unless a call was answered, or was still waiting as it may."""
    return error is not None and error.code() is not Code.DEADLINE_EXCEEDED


def fault(rpc: str, error: grpc.RpcError | None) -> str:
    """Return what is wrong with what came of a call, "" if it was answered, or refused so that a caller understands."""
    if error is None:
        return ""
    method, code = method_of(rpc), error.code()
    if not refused(error):
        return "" if method.server_streaming else f"{rpc} took longer than {UNARY_SECONDS} s"
    said = f"{rpc}: {code.name}: {error.details()}"
    if code not in REFUSALS:
        return f"{said}: not a code that this service has"
    found = details(error)
    if not error.details() or not found:
        return f"{said}: without a message, or without details"
    if code is not Code.INVALID_ARGUMENT:
        return ""
    violations = [
        each for detail in found if isinstance(detail, error_details_pb2.BadRequest) for each in detail.field_violations
    ]
    if not violations or not all(violation.description for violation in violations):
        return f"{said}: without a BadRequest that describes what is wrong"
    for violation in violations:  # no field is named where the bytes are no message
        if violation.field and not field_exists(method.input_type, violation.field):
            return f"{said}: there is no field '{violation.field}'"
    return ""


def field_exists(kind: Descriptor, path: str) -> bool:
    """True for the path of a field or a oneof, like "instances[3].prompt.input"."""
    name, _, rest = path.partition(".")
    name = re.sub(r"\[[^\]]*\]$", "", name)
    if not rest and name in kind.oneofs_by_name:
        return True
    field = kind.fields_by_name.get(name)
    if field is None or not rest:
        return field is not None
    return field.message_type is not None and field_exists(field.message_type, rest)


def resident_bytes(server: Server) -> int:
    """Return the memory of a server's process."""
    return psutil.Process(server.pid).memory_info().rss
