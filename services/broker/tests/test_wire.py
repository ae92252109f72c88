"""Messages put together from bytes are the messages that Protocol Buffers makes."""

import pytest
from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker.experience_codec import one_group, several_groups


def group(size: int, transcript: bytes) -> experience_pb2.ExperienceGroup:
    header = experience_pb2.GroupHeader(instance_id=f"pass-0/{size}", completions=8, reward_mean=0.5)
    return experience_pb2.ExperienceGroup(header=header, tensors=bytes(range(256)) * size, transcript=transcript)


def stored(whole: experience_pb2.ExperienceGroup) -> tuple[bytes, bytes | None]:
    payload = experience_pb2.ExperienceGroup(header=whole.header, tensors=whole.tensors)
    return payload.SerializeToString(), whole.transcript or None


# Lengths around the steps of a varint: one byte to 127, two to 16383, three to 2 MiB.
GROUPS = [
    group(size, bytes(length)) for size in (0, 1, 63, 64, 8200) for length in (0, 1, 127, 128, 16383, 16384, 70000)
]


@pytest.mark.parametrize("whole", GROUPS, ids=lambda whole: f"{len(whole.tensors)}-{len(whole.transcript)}")
def test_one_group(whole):
    expected = broker_pb2.LeaseExperienceResponse(group=whole)
    assert broker_pb2.LeaseExperienceResponse.FromString(one_group(*stored(whole))) == expected
    assert one_group(*stored(whole)) == expected.SerializeToString(deterministic=True)


def test_several_groups():
    expected = broker_pb2.LeaseExperienceResponse(groups=broker_pb2.ExperienceGroups(groups=GROUPS))
    made = several_groups([stored(whole) for whole in GROUPS])
    assert broker_pb2.LeaseExperienceResponse.FromString(made) == expected
    assert made == expected.SerializeToString(deterministic=True)
