"""Weights to rollouts in processes of their own, by each transport without GPUs, and what happens when they fail."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quartet.v1 import broker_pb2, tensor_pb2
from receiver import ReceiverProcess, Receivers

from quartet_common.config import SecuritySection
from quartet_trainer.config import WeightsSection
from quartet_trainer.weight_sync.publisher import Published, Publisher
from quartet_trainer.weight_sync.rollouts import Rollouts, WeightGroup
from quartet_trainer.weight_sync.transports import create_transport

pytestmark = pytest.mark.timeout(180)

BUCKET_BYTES = 4096
SHAPES = {"a.weight": (33, 31), "b.bias": (7,), "c.scale": (), "d.weight": (64, 64), "e.half": (5, 3)}
each_transport = pytest.mark.parametrize("publisher", ["gloo", "file", "gloo-packed", "file-packed"], indirect=True)
"""Each transport from a copy and, "packed", packed while it is sent."""


class StaticMembers:
    """The membership, as the test says."""

    def __init__(self) -> None:
        self.live: dict[str, broker_pb2.Member] = {}
        self.epoch = 0

    def add(self, receiver: ReceiverProcess) -> None:
        self.live[receiver.name] = receiver.member
        self.epoch += 1

    def rollouts(self) -> dict[str, broker_pb2.Member]:
        return dict(self.live)

    def alive(self, name: str) -> bool:
        return name in self.live


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made["e.half"] = made["e.half"].to(torch.bfloat16)
    return made


def specs() -> list[tuple[str, int, tuple[int, ...]]]:
    wire = {torch.float32: tensor_pb2.DTYPE_FLOAT32, torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16}
    return [(name, wire[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors(0).items()]


@pytest.fixture
def members() -> StaticMembers:
    return StaticMembers()


@pytest.fixture
def publisher(request: pytest.FixtureRequest, members: StaticMembers, tmp_path: Path) -> Iterator[Publisher]:
    transport = getattr(request, "param", "gloo")
    transport, _, without = transport.partition("-")
    settings = WeightsSection(
        transport=transport, bucket_bytes=BUCKET_BYTES, timeout_seconds=40, overlap=without != "packed"
    )
    made, rollouts = create_transport(settings, "127.0.0.1", tmp_path / "weights"), Rollouts(members, SecuritySection())
    publisher = Publisher("test", settings, made, rollouts, specs())
    yield publisher
    publisher.close()
    rollouts.close()


def publish(publisher: Publisher, version: int) -> Published | None:
    publisher.begin(version, lambda: (named for named in tensors(version).items()))
    return publisher.collect(wait=True)


def assert_installed(receiver: ReceiverProcess, version: int) -> None:
    """Every tensor is there, bit by bit."""
    data = receiver.installed(version)
    assert data is not None, f"{receiver.name} did not install version {version}"
    for name, tensor in tensors(version).items():
        assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) in data, name


@each_transport
def test_tensors_arrive_bit_by_bit_at_every_rollout(publisher: Publisher, members: StaticMembers, receiver: Receivers):
    assert publish(publisher, 1) is None, "there is no rollout, which is no error"
    both = [receiver("one"), receiver("two")]
    for each in both:
        members.add(each)
    for version in (1, 2, 3):
        published = publish(publisher, version)
        assert published is not None and published.rollouts == 2 and not published.failures
        assert published.bytes == sum(publisher._manifest.bucket_bytes)
        for each in both:
            assert_installed(each, version)
    assert len(publisher._manifest.bucket_bytes) > 2, "the test is to use more buckets than buffers"
    assert publisher.epoch == members.epoch + 1, "one group served all three updates"
    assert publish(publisher, 3) is None, "nobody is behind"


@each_transport
def test_a_rollout_that_was_away_and_comes_back_is_sent_to_by_the_same_group(
    publisher: Publisher, members: StaticMembers, receiver: Receivers
):
    back = receiver("back")
    members.add(back)
    assert publish(publisher, 1).rollouts == 1
    epoch, member = publisher.epoch, members.live.pop("back")
    assert not publisher.behind(2), "nobody is there; the channel to it is closed"
    members.live["back"] = member
    published = publish(publisher, 2)
    assert published.rollouts == 1 and not published.failures and publisher.epoch == epoch
    assert_installed(back, 2)


def test_a_member_in_whose_place_another_answers_is_left_out(
    publisher: Publisher, members: StaticMembers, receiver: Receivers
):
    well = receiver("well")
    members.add(well)
    members.live["killed"] = broker_pb2.Member()
    members.live["killed"].CopyFrom(well.member)  # whose membership has not ended
    members.live["killed"].instance_id = "killed"
    published = publish(publisher, 1)
    assert published.rollouts == 1 and len(published.failures) == 1, published.failures
    assert "killed: 'well' answers at its address" in published.failures[0]
    assert_installed(well, 1)


def test_a_rollout_that_got_other_bytes_is_synchronized_again(
    publisher: Publisher, members: StaticMembers, receiver: Receivers
):
    members.add(receiver("well"))
    spoiled = receiver("spoiled", spoil=1)
    members.add(spoiled)
    published = publish(publisher, 1)
    assert published.rollouts == 1 and "checksum" in published.failures[0]
    assert not publisher.behind(1), "it is in backoff"
    publisher._rollouts.live()["spoiled"].retry_at = 0.0
    assert publish(publisher, 1).rollouts == 2
    assert_installed(spoiled, 1)


class OfTheLearner(RuntimeError):
    """No transport raises this."""


@pytest.mark.parametrize("publisher", ["gloo-packed"], indirect=True)
def test_an_error_of_the_learner_is_no_failed_transfer(
    publisher: Publisher, members: StaticMembers, receiver: Receivers
):
    members.add(receiver("well"))

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(tensors(1).items()))
        raise OfTheLearner

    with pytest.raises(OfTheLearner):
        publisher.begin(1, weights)
    assert publisher.current(1) == 0


@pytest.mark.parametrize("publisher", ["file"], indirect=True)
def test_whatever_a_transport_raises_is_a_failed_transfer(
    publisher: Publisher, members: StaticMembers, receiver: Receivers, monkeypatch: pytest.MonkeyPatch
):
    well = receiver("well")
    members.add(well)
    send = publisher._transport.send
    errors = iter([BrokenPipeError("a hawk"), KeyError("a hawk")])

    def fail_twice(group: WeightGroup, buckets: Iterator[torch.Tensor]) -> None:
        if (error := next(errors, None)) is not None:
            raise error
        send(group, buckets)

    monkeypatch.setattr(publisher._transport, "send", fail_twice)
    published = publish(publisher, 1)
    assert published.rollouts == 1 and published.failures == [
        "transport 'file' failed: BrokenPipeError: a hawk",
        "transport 'file' failed: KeyError: 'a hawk'",
    ]
    assert_installed(well, 1)
