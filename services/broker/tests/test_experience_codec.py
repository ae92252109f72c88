"""Puts that are cut out of their bytes, and batches put together from bytes, are those of Protocol Buffers."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quartet.v1 import broker_pb2, experience_pb2

from quartet_server import wire as puts
from quartet_server.wire import field, one_group, put_group, put_request, read_put_request, several_groups

headers = st.builds(
    experience_pb2.GroupHeader,
    instance_id=st.text(max_size=20),
    purpose=st.sampled_from([0, 1, 2, 3]),
    max_policy_version=st.integers(0, 2**53),
    reward_mean=st.floats(allow_nan=False),
)
# Lengths around the steps of a varint: one byte to 127, two to 16383, three to 2 MiB.
blobs = st.sampled_from([0, 1, 127, 128, 16383, 16384, 70000]).map(bytes)
groups = st.builds(experience_pb2.ExperienceGroup, header=headers, tensors=blobs, transcript=blobs)
requests = st.builds(
    broker_pb2.PutExperienceRequest,
    run_id=st.text(min_size=1, max_size=20),
    groups=st.lists(
        st.builds(broker_pb2.PutGroup, lease_id=st.text(min_size=1, max_size=200), group=groups), max_size=3
    ),
)


def of_client(request: broker_pb2.PutExperienceRequest) -> bytes:
    """The request as a client of ours sends it."""
    made = [
        put_group(each.lease_id, each.group.header, each.group.tensors, each.group.transcript)
        for each in request.groups
    ]
    return put_request(request.run_id, made)


def read(data: bytes):
    """What becomes of a request's bytes; None if they are none."""
    try:
        request = read_put_request(data)
    except DecodeError:
        return None
    return request.run_id, [
        (each.lease_id, each.header, bytes(each.stored), bytes(each.transcript)) for each in request.groups
    ]


def parsed(data: bytes):
    """The same, by Protocol Buffers."""
    try:
        request = broker_pb2.PutExperienceRequest.FromString(data)
    except DecodeError:
        return None
    found = []
    for put in request.groups:
        stored = experience_pb2.ExperienceGroup()
        stored.CopyFrom(put.group)
        stored.ClearField("transcript")
        found.append((put.lease_id, put.group.header, stored.SerializeToString(), put.group.transcript))
    return request.run_id, found


@settings(max_examples=60, deadline=None)
@given(requests)
def test_our_clients_requests_are_those_of_protocol_buffers_and_are_cut(request):
    data = of_client(request)
    assert data == request.SerializeToString(deterministic=True)
    cut = puts._slice(data)  # noqa: SLF001 - it is what must not fall back
    assert len(cut.groups) == len(request.groups)
    assert read(data) == parsed(data)


@settings(max_examples=60, deadline=None)
@given(st.lists(groups, max_size=4))
def test_batches_are_what_protocol_buffers_makes(batch):
    stored = []
    for each in batch:
        payload = experience_pb2.ExperienceGroup(header=each.header, tensors=each.tensors)
        stored.append((payload.SerializeToString(), each.transcript or None))
        expected = broker_pb2.LeaseExperienceResponse(group=each)
        assert one_group(*stored[-1]) == expected.SerializeToString(deterministic=True)
    together = broker_pb2.LeaseExperienceResponse(groups=broker_pb2.ExperienceGroups(groups=batch))
    assert several_groups(stored) == together.SerializeToString(deterministic=True)


def some(**fields) -> experience_pb2.ExperienceGroup:
    return experience_pb2.ExperienceGroup(header=experience_pb2.GroupHeader(instance_id="a/1"), **fields)


def in_request(group: bytes, lease: bytes = b"lease") -> bytes:
    put = [*field(1, [lease]), *field(2, [group])]
    return b"".join([*field(1, [b"run"]), *field(2, put)])


HEADER = b"".join(field(1, [some().header.SerializeToString()]))
TENSORS, TRANSCRIPT = (b"".join(field(number, [b"x" * 300])) for number in (2, 3))
UNUSUAL = {
    "transcript-first": in_request(TRANSCRIPT + HEADER + TENSORS),
    "header-in-two": in_request(HEADER + HEADER),
    "nothing": in_request(b""),
    "no-lease": b"".join([*field(1, [b"run"]), *field(2, field(2, [HEADER]))]),
    "group-twice": b"".join([*field(1, [b"run"]), *field(2, [*field(1, [b"l"]), *field(2, [HEADER])] * 2)]),
    "empty": b"",
    "length-in-ten-bytes": in_request(HEADER).replace(b"\x0a\x03run", b"\x0a\x83" + b"\x80" * 8 + b"\x00run"),
    "lease-is-no-text": in_request(HEADER, b"\xff\xfe"),
    "longer-than-it-is": in_request(HEADER + TENSORS)[:-5],
}


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_requests_are_read_as_protocol_buffers_reads_them(data):
    assert read(data) == parsed(data)


WHOLE = of_client(
    broker_pb2.PutExperienceRequest(
        run_id="run",
        groups=[
            broker_pb2.PutGroup(lease_id="lease", group=some(tensors=b"x" * 200, transcript=b"y" * 5)) for _ in range(2)
        ],
    )
)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
@example(0, 0x12)
def test_a_byte_that_is_another_does_not_make_another_request_of_it(place, byte):
    data = WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :]
    got, expected = read(data), parsed(data)
    assert (got is None) == (expected is None)
    if got is not None:
        # Stored bytes are as they came, where the message object would write what is unknown at another place.
        assert (got[0], [understood(each) for each in got[1]]) == (
            expected[0],
            [understood(each) for each in expected[1]],
        )


def understood(group: tuple) -> tuple:
    lease_id, header, stored, transcript = group
    return lease_id, header, experience_pb2.ExperienceGroup.FromString(stored), transcript
