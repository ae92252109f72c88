"""A server to send bad messages to: what came back, and whether a refusal left anything behind."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import grpc
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


@dataclass
class Answer:
    """What one call came to."""

    code: grpc.StatusCode
    error: grpc.RpcError | None = None

    @property
    def refused(self) -> bool:
        """True unless it was answered, or was still waiting as it may."""
        return self.code not in (Code.OK, Code.DEADLINE_EXCEEDED)


def send(caller: Caller, rpc: str, data: bytes) -> Answer:
    """Send bytes as a request. A stream is left after its first message; one that has none yet is not waited for."""
    method = method_of(rpc)
    call = caller.callable(method, bytes)
    given = iter([data]) if method.client_streaming else data
    try:
        if not method.server_streaming:
            call(given, timeout=UNARY_SECONDS, metadata=caller.metadata)
            return Answer(Code.OK)
        answers = call(given, timeout=STREAM_SECONDS, metadata=caller.metadata)
        try:
            for _ in itertools.islice(answers, 1):
                pass
        finally:
            answers.cancel()
        return Answer(Code.OK)
    except grpc.RpcError as error:
        return Answer(error.code(), error)


def fault(rpc: str, data: bytes, answer: Answer) -> str:
    """Return what is wrong with a refusal, "" if it is one that a caller can understand."""
    method = method_of(rpc)
    if not answer.refused:
        waits = answer.code is Code.DEADLINE_EXCEEDED and not method.server_streaming
        return f"{rpc} took longer than {UNARY_SECONDS} s" if waits else ""
    error = answer.error
    said = f"{rpc}: {answer.code.name}: {error.details()}"
    if answer.code not in REFUSALS:
        return f"{said}: not a code that this service has"
    found = details(error)
    if not error.details() or not found:
        return f"{said}: without a message, or without details"
    if answer.code is not Code.INVALID_ARGUMENT:
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
    status = Path(f"/proc/{server.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024
