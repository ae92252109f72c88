"""Converts experience between gRPC messages and values in Redis without parsing the tensors.

A request has up to 64 MiB, of which the broker reads only the headers; parsing it would copy every group twice. So it
is sliced where the fields of its groups begin. A request with unknown fields, or with fields in another order than our
clients write, is parsed instead, with the same result. A batch is sent by writing field tags between the stored bytes:
a stored group followed by its transcript is a serialized group (`quartet_server.wire`).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from quartet.v1 import broker_pb2, experience_pb2

from quartet_server.wire import Bytes, field

# Tags of the fields that are read here: the field's number, and 2 for "length-delimited".
_RUN_ID = broker_pb2.PutExperienceRequest.RUN_ID_FIELD_NUMBER << 3 | 2
_GROUPS = broker_pb2.PutExperienceRequest.GROUPS_FIELD_NUMBER << 3 | 2
_LEASE_ID = broker_pb2.PutGroup.LEASE_ID_FIELD_NUMBER << 3 | 2
_GROUP = broker_pb2.PutGroup.GROUP_FIELD_NUMBER << 3 | 2
HEADER = experience_pb2.ExperienceGroup.HEADER_FIELD_NUMBER << 3 | 2
_TENSORS = experience_pb2.ExperienceGroup.TENSORS_FIELD_NUMBER << 3 | 2
_TRANSCRIPT = experience_pb2.ExperienceGroup.TRANSCRIPT_FIELD_NUMBER << 3 | 2
_LONGEST_VARINT = 5  # bytes; enough for the length of any message


@dataclass(frozen=True, slots=True)
class Put:
    """A group that was put.

    Attributes:
        stored: a serialized ExperienceGroup without its transcript.
        transcript: b"" if there is none.
    """

    lease_id: str
    header: experience_pb2.GroupHeader
    stored: Bytes
    transcript: Bytes


@dataclass(frozen=True, slots=True)
class PutRequest:
    """PutExperienceRequest."""

    run_id: str
    groups: Sequence[Put]


class UnusualError(Exception):
    """The bytes are not laid out as `_slice` reads them."""


def put_handler(answer: Callable[..., Awaitable[broker_pb2.PutExperienceResponse]]) -> grpc.RpcMethodHandler:
    """Return the handler of PutExperience whose requests are `PutRequest`s."""
    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=read_put_request,
        response_serializer=broker_pb2.PutExperienceResponse.SerializeToString,
    )


def read_put_request(data: bytes) -> PutRequest:
    """Read a serialized PutExperienceRequest. Raises DecodeError."""
    try:
        return _slice(data)
    except (UnusualError, IndexError, UnicodeDecodeError, DecodeError):
        return _from_message(broker_pb2.PutExperienceRequest.FromString(data))


def _from_message(request: broker_pb2.PutExperienceRequest) -> PutRequest:
    puts = []
    for put in request.groups:
        group, transcript = put.group, put.group.transcript
        group.ClearField("transcript")
        puts.append(Put(put.lease_id, group.header, group.SerializeToString(), transcript))
    return PutRequest(request.run_id, puts)


def _slice(data: bytes) -> PutRequest:
    whole, size = memoryview(data), len(data)
    at, end = read_field(data, 0, _RUN_ID, size)
    run_id, puts = data[at:end].decode(), []
    while end < size:
        at, put_end = read_field(data, end, _GROUPS, size)
        at, end = read_field(data, at, _LEASE_ID, put_end)
        lease_id = data[at:end].decode()
        group, end = read_field(data, end, _GROUP, put_end)
        if end != put_end:
            raise UnusualError
        at, stored_end = read_field(data, group, HEADER, end)
        header = experience_pb2.GroupHeader.FromString(whole[at:stored_end])
        if stored_end < end and data[stored_end] == _TENSORS:
            _, stored_end = read_field(data, stored_end, _TENSORS, end)
        transcript: Bytes = b""
        if stored_end < end:
            at, transcript_end = read_field(data, stored_end, _TRANSCRIPT, end)
            if transcript_end != end:
                raise UnusualError
            transcript = whole[at:end]
        puts.append(Put(lease_id, header, whole[group:stored_end], transcript))
    return PutRequest(run_id, puts)


def read_field(data: Bytes, at: int, tag: int, limit: int) -> tuple[int, int]:
    """Return begin and end of the contents of the field `tag` at `at`. Raises UnusualError, IndexError."""
    if data[at] != tag:
        raise UnusualError
    length = data[at + 1]
    start = at + 2
    if length > 0x7F:
        length, shift = length & 0x7F, 7
        for byte in data[start : start + _LONGEST_VARINT - 1]:
            start += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte <= 0x7F:
                break
        else:
            raise UnusualError
    if start + length > limit:
        raise UnusualError
    return start, start + length


_BATCH_GROUP = broker_pb2.LeaseExperienceResponse.GROUP_FIELD_NUMBER
_BATCH_GROUPS = broker_pb2.LeaseExperienceResponse.GROUPS_FIELD_NUMBER
_GROUPS_GROUPS = broker_pb2.ExperienceGroups.GROUPS_FIELD_NUMBER
_GROUP_TRANSCRIPT = experience_pb2.ExperienceGroup.TRANSCRIPT_FIELD_NUMBER


def _group(payload: Bytes, transcript: Bytes | None) -> list[Bytes]:
    """Return a serialized ExperienceGroup, in parts. `payload`: one without its transcript."""
    return [payload, *field(_GROUP_TRANSCRIPT, [transcript])] if transcript else [payload]


def one_group(payload: Bytes, transcript: Bytes | None) -> bytes:
    """Return a serialized LeaseExperienceResponse with `group`."""
    return b"".join(field(_BATCH_GROUP, _group(payload, transcript)))


def several_groups(groups: Sequence[tuple[Bytes, Bytes | None]]) -> bytes:
    """Return a serialized LeaseExperienceResponse with `groups`, of the payload and transcript of each."""
    listed: list[Bytes] = []
    for payload, transcript in groups:
        listed += field(_GROUPS_GROUPS, _group(payload, transcript))
    return b"".join(field(_BATCH_GROUPS, listed))
