"""Errors of the contract: gRPC statuses with google.rpc details.

Servers raise what the functions here return, and the interceptor sends it. Clients use `describe` on what they catch.
"""

from collections.abc import Iterable

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from quartet_common.durations import to_duration, to_seconds
from quartet_common.text import encodable

_DETAILS_KEY = "grpc-status-details-bin"
# A status travels in HTTP/2 trailers, up to three times and partly in percent encoding; clients refuse trailers of more
# than 8 KiB with RESOURCE_EXHAUSTED.
_LONGEST_MESSAGE = 1000
_LONGEST_SHOWN = 120


# Codes that mean a service is unavailable for now; it may have carried out the call. A server that stops answers
# CANCELLED to calls that it has not started.
AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


class ContractError(Exception):
    """An error that is sent to the caller: status code, sentence, details."""

    def __init__(self, code: grpc.StatusCode, message: str, details: Iterable[Message] = ()):
        self.code = code
        self.message = encodable(message, _LONGEST_MESSAGE)
        super().__init__(self.message)
        self.details = tuple(details)

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Return the metadata that carries the google.rpc.Status."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = Any()
            packed.Pack(detail)
            status.details.append(packed)
        return ((_DETAILS_KEY, status.SerializeToString()),)


def invalid_argument(field: str, came: object, allowed: str) -> ContractError:
    """A field has an invalid value: names the field, what came and what is allowed."""
    field, came = (encodable(str(each), _LONGEST_SHOWN) for each in (field, came))
    sentence = f"{field}: got {came}; allowed: {allowed}"
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=f"got {came}; allowed: {allowed}")
    return ContractError(
        grpc.StatusCode.INVALID_ARGUMENT, sentence, [error_details_pb2.BadRequest(field_violations=[violation])]
    )


def invalid_request(description: str) -> ContractError:
    """A request is invalid as a whole, not by one of its fields."""
    violation = error_details_pb2.BadRequest.FieldViolation(description=description)
    return ContractError(
        grpc.StatusCode.INVALID_ARGUMENT, description, [error_details_pb2.BadRequest(field_violations=[violation])]
    )


def not_found(kind: str, name: str, hint: str = "") -> ContractError:
    """A named thing does not exist."""
    sentence = f"{kind} '{name}' does not exist" + (f": {hint}" if hint else "")
    return ContractError(
        grpc.StatusCode.NOT_FOUND, sentence, [error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name)]
    )


def already_exists(kind: str, name: str, difference: str) -> ContractError:
    """A named thing exists with another content: says how it differs."""
    return ContractError(
        grpc.StatusCode.ALREADY_EXISTS,
        f"{kind} '{name}' exists and differs: {difference}",
        [error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name, description=difference)],
    )


def failed_precondition(subject: str, description: str) -> ContractError:
    """The system is not in the state the call needs; retrying does not help until something else changes."""
    violation = error_details_pb2.PreconditionFailure.Violation(type="STATE", subject=subject, description=description)
    return ContractError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"{subject}: {description}",
        [error_details_pb2.PreconditionFailure(violations=[violation])],
    )


def resource_exhausted(subject: str, description: str, retry_after_seconds: float | None = None) -> ContractError:
    """A limit is reached. `retry_after_seconds`: set if waiting may help."""
    violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=description)
    details: list[Message] = [error_details_pb2.QuotaFailure(violations=[violation])]
    if retry_after_seconds is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=to_duration(retry_after_seconds)))
    return ContractError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{subject}: {description}", details)


def unavailable(subject: str, description: str, retry_after_seconds: float = 0.5) -> ContractError:
    """Something that the call needs is unavailable; the caller should retry."""
    return ContractError(
        grpc.StatusCode.UNAVAILABLE,
        f"{subject}: {description}",
        [error_details_pb2.RetryInfo(retry_delay=to_duration(retry_after_seconds))],
    )


def _plain(code: grpc.StatusCode, subject: str, description: str) -> ContractError:
    info = error_details_pb2.ErrorInfo(reason=code.name, domain="quartet.v1", metadata={"subject": subject})
    return ContractError(code, f"{subject}: {description}", [info])


def aborted(subject: str, description: str) -> ContractError:
    """The operation was aborted before its end; the description says why."""
    return _plain(grpc.StatusCode.ABORTED, subject, description)


def data_loss(subject: str, description: str) -> ContractError:
    """What arrived is not what was sent."""
    return _plain(grpc.StatusCode.DATA_LOSS, subject, description)


def unimplemented(subject: str, description: str) -> ContractError:
    """This build does not support the call; the description says what does."""
    return _plain(grpc.StatusCode.UNIMPLEMENTED, subject, description)


def unauthenticated(description: str) -> ContractError:
    """The caller did not prove who it is."""
    return _plain(grpc.StatusCode.UNAUTHENTICATED, "authorization", description)


def permission_denied(method: str, description: str) -> ContractError:
    """The caller is known and may not do this."""
    return _plain(grpc.StatusCode.PERMISSION_DENIED, method, description)


def _status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    trailing = getattr(error, "trailing_metadata", None)
    for key, value in (trailing() if trailing else None) or ():
        if key == _DETAILS_KEY:
            return status_pb2.Status.FromString(value)
    return None


def is_answer(error: BaseException) -> bool:
    """Return whether the error was sent by a service itself, which is therefore reachable."""
    return isinstance(error, ContractError) or (isinstance(error, grpc.RpcError) and _status_of(error) is not None)


def describe(error: BaseException) -> str:
    """Return one sentence about any error of a call."""
    if isinstance(error, ContractError):
        return error.message
    if not isinstance(error, grpc.RpcError):
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    status = _status_of(error)
    if status is not None and status.message:
        return status.message
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    name = code().name if code and code() else "UNKNOWN"
    text = (details() if details else "") or ""
    return f"{name}: {text}" if text else name


def retry_delay(error: grpc.RpcError) -> float | None:
    """Return the seconds after which the server suggests a retry, or None if it suggests none."""
    info = error_details_pb2.RetryInfo()
    return to_seconds(info.retry_delay) if _unpack_detail(error, info) else None


def missing_kind(error: grpc.RpcError) -> str:
    """Return the kind of thing that does not exist, the first argument of `not_found`; empty for any other error."""
    info = error_details_pb2.ResourceInfo()
    return info.resource_type if error.code() is grpc.StatusCode.NOT_FOUND and _unpack_detail(error, info) else ""


def _unpack_detail(error: grpc.RpcError, info: Message) -> bool:
    """Read the error's first detail of the type of `info` into it; return whether there is one."""
    status = _status_of(error)
    return any(detail.Unpack(info) for detail in status.details) if status else False
