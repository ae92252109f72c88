"""The receiving half of the NCCL transport, on host memory: meeting, order of operations, buckets, checksum."""

from __future__ import annotations

import dataclasses
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from models import read_weights
from packing import checksum, pack
from torch.distributed import PrefixStore, TCPStore

sys.path.insert(0, str(Path(__file__).parents[3] / "common" / "tests"))

import fake_nccl

from quartet_common import nccl
from quartet_rollout.engines.base import WeightGroupInfo, WeightTransferError
from quartet_rollout.weights import transport
from quartet_rollout.weights.nccl import UNIQUE_ID_KEY, NcclGroup
from quartet_rollout.weights.receiver import WeightReceiver

TIMEOUT = timedelta(seconds=20)


class Sender:
    """Rank 0, written from docs/weights.md."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        self.info = WeightGroupInfo("nccl", "127.0.0.1", self.store.port, 1, 2, 20.0, b"secret", 4)

    def send(self, buckets: list[torch.Tensor]) -> threading.Thread:
        def run() -> None:
            identity = nccl.unique_id()
            PrefixStore(f"quartet/4/{b'secret'.hex()}", self.store).set(UNIQUE_ID_KEY, identity)
            communicator = nccl.Communicator(identity, 0, 2, 20.0)
            one = torch.zeros(1)
            communicator.sum_one(one.data_ptr(), 0)
            for bucket in buckets:
                communicator.broadcast(bucket.data_ptr(), bucket.numel(), 0)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> fake_nccl.FakeNccl:
    """A fake library, and groups whose buckets are in host memory."""
    monkeypatch.setattr(transport, "join", lambda info: NcclGroup(info, torch.device("cpu"), lambda _: fake_stream()))
    fake_stream = fake_nccl.HostStream
    return fake_nccl.install(monkeypatch)


def test_buckets_come_after_the_first_sum_and_have_the_checksum(fake, models) -> None:
    weights = read_weights(models[True, 0])
    manifest, buckets = pack(weights, 1 << 18)
    sender, receiver = Sender(), WeightReceiver()
    thread = sender.send(buckets)
    receiver.join(sender.info)
    assert receiver.receive(manifest, 20.0) == checksum(buckets)
    thread.join(20.0)
    for name, tensor in receiver.tensors():
        assert torch.equal(tensor, weights[name]), name
    (group,) = fake.groups.values()
    assert [name for name, _ in group.posted] == ["sum", *["broadcast"] * len(buckets)]


def test_a_group_that_was_left_receives_no_more(fake, models) -> None:
    manifest, buckets = pack(read_weights(models[True, 0]), 1 << 18)
    sender = Sender()
    sender.send(buckets)
    group = NcclGroup(sender.info, torch.device("cpu"), lambda _: fake_nccl.HostStream())
    group.close()
    with pytest.raises(WeightTransferError, match="NCCL: invalid argument"):
        group.fill(manifest, buckets, "", 5.0, lambda _: None)


def test_a_trainer_that_dies_after_the_rendezvous_costs_the_deadline_of_the_meeting(fake) -> None:
    sender = Sender()
    PrefixStore(f"quartet/4/{b'secret'.hex()}", sender.store).set(UNIQUE_ID_KEY, nccl.unique_id())
    info = dataclasses.replace(sender.info, timeout_seconds=0.5)
    with pytest.raises(WeightTransferError, match=r"epoch 4 .* within 0.5 s: NCCL: rank 1 did not meet all 2 ranks"):
        WeightReceiver().join(info)
    assert not fake.ranks, "the attempt was aborted, and no thread waits for it"


def test_without_a_gpu_nccl_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_gpus", lambda: 0)
    assert transport.transports() == ["gloo", "file"]
    assert "there is no CUDA GPU on this machine: use the transport gloo or file" in nccl.why_not()
