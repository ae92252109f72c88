"""Experience as bytes: what rollouts put, what the broker reads of it and stores, and the batches it sends.

In the wire format of Protocol Buffers a submessage is a tag, a length and its bytes, and concatenated fields are a
message. So the bytes of a group's tensors, as rollouts make them and Redis holds them, are copied once, between field
tags. A message object would copy them in, again while its buffer grows, and out of it, each time to fresh pages.

A request has up to 64 MiB, of which the broker reads only the headers: it is sliced where the fields of its groups
begin. A request with unknown fields, or with fields in another order than our clients write, is parsed instead, with
the same result. A stored group followed by its transcript is a serialized group.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from quartet.v1 import broker_pb2, experience_pb2

_RUN_ID = broker_pb2.PutExperienceRequest.RUN_ID_FIELD_NUMBER
_GROUPS = broker_pb2.PutExperienceRequest.GROUPS_FIELD_NUMBER
_LEASE_ID = broker_pb2.PutGroup.LEASE_ID_FIELD_NUMBER
_GROUP = broker_pb2.PutGroup.GROUP_FIELD_NUMBER
HEADER = experience_pb2.ExperienceGroup.HEADER_FIELD_NUMBER
_TENSORS = experience_pb2.ExperienceGroup.TENSORS_FIELD_NUMBER
_TRANSCRIPT = experience_pb2.ExperienceGroup.TRANSCRIPT_FIELD_NUMBER
_BATCH_GROUP = broker_pb2.LeaseExperienceResponse.GROUP_FIELD_NUMBER
_BATCH_GROUPS = broker_pb2.LeaseExperienceResponse.GROUPS_FIELD_NUMBER
_GROUPS_GROUPS = broker_pb2.ExperienceGroups.GROUPS_FIELD_NUMBER
_LONGEST_VARINT = 5  # bytes; enough for the length of any message

_PUT_EXPERIENCE = "/quartet.v1.BrokerService/PutExperience"

Bytes = bytes | memoryview


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


def varint(value: int) -> bytes:
    """Return a number >= 0 as a varint: seven bits per byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _tag(number: int) -> int:
    return number << 3 | 2  # 2: length-delimited


def field(number: int, parts: Sequence[Bytes]) -> list[Bytes]:
    """Return a field of type bytes, string or message, in parts."""
    return [varint(_tag(number)), varint(sum(map(len, parts))), *parts]


def put_group(
    lease_id: str, header: experience_pb2.GroupHeader, tensors: bytes, transcript: bytes = b""
) -> list[Bytes]:
    """Return a serialized PutGroup, in parts."""
    group = field(HEADER, [header.SerializeToString()])
    if tensors:
        group += field(_TENSORS, [tensors])
    if transcript:
        group += field(_TRANSCRIPT, [transcript])
    return [*field(_LEASE_ID, [lease_id.encode()]), *field(_GROUP, group)]


def put_request(run_id: str, groups: Iterable[Sequence[Bytes]]) -> bytes:
    """Return a serialized PutExperienceRequest of groups made by `put_group`."""
    parts = field(_RUN_ID, [run_id.encode()])
    for group in groups:
        parts += field(_GROUPS, group)
    return b"".join(parts)


def put_experience(channel: grpc.aio.Channel) -> Any:
    """Return PutExperience of the broker behind a channel: a callable that takes the bytes of `put_request`."""
    return channel.unary_unary(_PUT_EXPERIENCE, response_deserializer=broker_pb2.PutExperienceResponse.FromString)


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
        if stored_end < end and data[stored_end] == _tag(_TENSORS):
            _, stored_end = read_field(data, stored_end, _TENSORS, end)
        transcript: Bytes = b""
        if stored_end < end:
            at, transcript_end = read_field(data, stored_end, _TRANSCRIPT, end)
            if transcript_end != end:
                raise UnusualError
            transcript = whole[at:end]
        puts.append(Put(lease_id, header, whole[group:stored_end], transcript))
    return PutRequest(run_id, puts)


def read_field(data: Bytes, at: int, number: int, limit: int) -> tuple[int, int]:
    """Return begin and end of the contents of the field at `at`, whose number is expected. Raises UnusualError,
    IndexError."""
    if data[at] != _tag(number):
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


def _group(payload: Bytes, transcript: Bytes | None) -> list[Bytes]:
    """Return a serialized ExperienceGroup, in parts. `payload`: one without its transcript."""
    return [payload, *field(_TRANSCRIPT, [transcript])] if transcript else [payload]


def one_group(payload: Bytes, transcript: Bytes | None) -> bytes:
    """Return a serialized LeaseExperienceResponse with `group`."""
    return b"".join(field(_BATCH_GROUP, _group(payload, transcript)))


def several_groups(groups: Sequence[tuple[Bytes, Bytes | None]]) -> bytes:
    """Return a serialized LeaseExperienceResponse with `groups`, of the payload and transcript of each."""
    listed: list[Bytes] = []
    for payload, transcript in groups:
        listed += field(_GROUPS_GROUPS, _group(payload, transcript))
    return b"".join(field(_BATCH_GROUPS, listed))
