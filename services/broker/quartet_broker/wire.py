"""A batch's messages as bytes: what Redis holds is put between field tags, without making a message of it first.

In the wire format of Protocol Buffers a submessage is its tag, its length and its bytes, and the fields of a message
are those of its parts put after one another. So a group as it was stored, followed by its transcript, is the group, and
groups after one another are the list of them. Made through message objects each payload would be copied three times.
"""

from collections.abc import Sequence

from quartet.v1 import broker_pb2, experience_pb2

_GROUP = broker_pb2.LeaseExperienceResponse.GROUP_FIELD_NUMBER
_GROUPS = broker_pb2.LeaseExperienceResponse.GROUPS_FIELD_NUMBER
_LISTED = broker_pb2.ExperienceGroups.GROUPS_FIELD_NUMBER
_TRANSCRIPT = experience_pb2.ExperienceGroup.TRANSCRIPT_FIELD_NUMBER


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, parts: Sequence[bytes]) -> list[bytes]:
    """Return a field of type bytes, string or message, in parts."""
    return [_varint(number << 3 | 2), _varint(sum(map(len, parts))), *parts]


def _group(payload: bytes, transcript: bytes | None) -> list[bytes]:
    """Return a serialized ExperienceGroup, in parts. `payload`: one without its transcript."""
    return [payload, *_field(_TRANSCRIPT, [transcript])] if transcript else [payload]


def one_group(payload: bytes, transcript: bytes | None) -> bytes:
    """Return a serialized LeaseExperienceResponse with `group`."""
    return b"".join(_field(_GROUP, _group(payload, transcript)))


def several_groups(groups: Sequence[tuple[bytes, bytes | None]]) -> bytes:
    """Return a serialized LeaseExperienceResponse with `groups`, of the payload and transcript of each."""
    listed: list[bytes] = []
    for payload, transcript in groups:
        listed += _field(_LISTED, _group(payload, transcript))
    return b"".join(_field(_GROUPS, listed))
