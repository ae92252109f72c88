"""Serializes messages from parts that are bytes already, without message objects for the large ones.

In the wire format of Protocol Buffers a submessage is a tag, a length and its bytes, and concatenated fields are a
message. So the bytes of a group's tensors, as rollouts make them and Redis holds them, are copied once, between field
tags. A message object would copy them in, again while its buffer grows, and out of it, each time to fresh pages.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from quartet.v1 import broker_pb2, experience_pb2

_RUN_ID = broker_pb2.PutExperienceRequest.RUN_ID_FIELD_NUMBER
_GROUPS = broker_pb2.PutExperienceRequest.GROUPS_FIELD_NUMBER
_LEASE_ID = broker_pb2.PutGroup.LEASE_ID_FIELD_NUMBER
_GROUP = broker_pb2.PutGroup.GROUP_FIELD_NUMBER
_HEADER = experience_pb2.ExperienceGroup.HEADER_FIELD_NUMBER
_TENSORS = experience_pb2.ExperienceGroup.TENSORS_FIELD_NUMBER
_TRANSCRIPT = experience_pb2.ExperienceGroup.TRANSCRIPT_FIELD_NUMBER

_PUT_EXPERIENCE = "/quartet.v1.BrokerService/PutExperience"

Bytes = bytes | memoryview


def varint(value: int) -> bytes:
    """Return a number >= 0 as a varint: seven bits per byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def field(number: int, parts: Sequence[Bytes]) -> list[Bytes]:
    """Return a field of type bytes, string or message, in parts."""
    return [varint(number << 3 | 2), varint(sum(map(len, parts))), *parts]


def put_group(
    lease_id: str, header: experience_pb2.GroupHeader, tensors: bytes, transcript: bytes = b""
) -> list[Bytes]:
    """Return a serialized PutGroup, in parts."""
    group = field(_HEADER, [header.SerializeToString()])
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
