"""A batch's messages as bytes: what Redis holds is put between field tags, without making a message of it first.

A group as it was stored, followed by its transcript, is the group, and groups after one another are the list of them
(`quartet_common.wire`). Made through message objects each payload would be copied three times.
"""

from collections.abc import Sequence

from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.wire import Bytes, field

_GROUP = broker_pb2.LeaseExperienceResponse.GROUP_FIELD_NUMBER
_GROUPS = broker_pb2.LeaseExperienceResponse.GROUPS_FIELD_NUMBER
_LISTED = broker_pb2.ExperienceGroups.GROUPS_FIELD_NUMBER
_TRANSCRIPT = experience_pb2.ExperienceGroup.TRANSCRIPT_FIELD_NUMBER


def _group(payload: bytes, transcript: bytes | None) -> list[Bytes]:
    """Return a serialized ExperienceGroup, in parts. `payload`: one without its transcript."""
    return [payload, *field(_TRANSCRIPT, [transcript])] if transcript else [payload]


def one_group(payload: bytes, transcript: bytes | None) -> bytes:
    """Return a serialized LeaseExperienceResponse with `group`."""
    return b"".join(field(_GROUP, _group(payload, transcript)))


def several_groups(groups: Sequence[tuple[bytes, bytes | None]]) -> bytes:
    """Return a serialized LeaseExperienceResponse with `groups`, of the payload and transcript of each."""
    listed: list[Bytes] = []
    for payload, transcript in groups:
        listed += field(_LISTED, _group(payload, transcript))
    return b"".join(field(_GROUPS, listed))
