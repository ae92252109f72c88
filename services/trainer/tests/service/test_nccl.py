"""The sending half of the NCCL transport, on host memory: meeting, order of operations, packing, checksum."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quartet.v1 import rollout_pb2, tensor_pb2

sys.path.insert(0, str(Path(__file__).parents[3] / "common" / "tests"))

import fake_nccl

from quartet_common import nccl
from quartet_common.config import ConfigError
from quartet_common.store_gate import StoreClient
from quartet_common.weights import Checksum, plan_buckets
from quartet_trainer.config import WeightsSection
from quartet_trainer.publisher.nccl import UNIQUE_ID_KEY, Nccl
from quartet_trainer.publisher.packing import Packer
from quartet_trainer.publisher.store import WeightStore
from quartet_trainer.publisher.transport import create_transport

HOST = torch.device("cpu")


class Load:
    """A `Carriage` of five tensors in several buckets."""

    version = 1
    checksum = None

    def __init__(self) -> None:
        self.tensors = {f"layer.{index}": torch.randn(40, 10 + index).to(torch.bfloat16) for index in range(5)}
        specs = [(name, tensor_pb2.DTYPE_BFLOAT16, tensor.shape) for name, tensor in self.tensors.items()]
        self.manifest = plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, specs, 1024)
        self.begun = 0

    def buckets(self) -> Iterator[torch.Tensor]:
        return Packer(self.manifest, HOST).pack(iter(self.tensors.items()))

    def begin(self, path: str = "") -> None:
        self.begun += 1

    def check(self) -> None:
        """Nobody is gone."""


class Receiver(threading.Thread):
    """Rank 1, written from docs/weights.md."""

    def __init__(self, store: WeightStore, sizes: list[int]):
        super().__init__(daemon=True)
        store.open(7, b"secret")
        self._epoch = StoreClient(store.host, store.port, 7, b"secret", timeout=20.0)
        self.buckets = [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def run(self) -> None:
        (identity,) = self._epoch.get([UNIQUE_ID_KEY])
        communicator = nccl.Communicator(identity, 1, 2, 20.0)
        one = torch.zeros(1)
        communicator.sum_one(one.data_ptr(), 0)
        for bucket in self.buckets:
            communicator.broadcast(bucket.data_ptr(), bucket.numel(), 0)


def test_packed_buckets_go_out_after_the_first_sum(monkeypatch: pytest.MonkeyPatch):
    fake_nccl.install(monkeypatch)
    store, load = WeightStore("127.0.0.1"), Load()
    transport = Nccl(store, HOST, lambda _: fake_nccl.HostStream())
    assert transport.libraries == {"nccl": "2.27.3"}
    receiver = Receiver(store, list(load.manifest.bucket_bytes))
    receiver.start()
    channel = transport.meet(7, b"secret", 2, 20.0)
    checksum = channel.carry(load)
    receiver.join(20.0)
    assert load.begun == 1 and len(receiver.buckets) > 3, "more buckets than buffers"
    came = Checksum()
    for bucket in receiver.buckets:
        came.update(memoryview(bucket.numpy()))
    assert came.value() == checksum
    for tensor in load.manifest.tensors:
        data = load.tensors[tensor.name].reshape(-1).view(torch.uint8)
        assert torch.equal(receiver.buckets[tensor.bucket][tensor.offset : tensor.offset + len(data)], data)


def test_a_rollout_that_never_comes_costs_the_deadline_of_the_meeting(monkeypatch: pytest.MonkeyPatch):
    fake = fake_nccl.install(monkeypatch)
    transport = Nccl(WeightStore("127.0.0.1"), HOST, lambda _: fake_nccl.HostStream())
    with pytest.raises(nccl.NcclError, match=r"rank 0 did not meet all 2 ranks of its group: one has died"):
        transport.meet(8, b"secret", 2, 0.05)
    assert not fake.ranks, "the attempt was aborted, and no thread waits for it"


def test_a_machine_without_a_gpu_refuses_nccl_with_the_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl, "_gpus", lambda: 0)
    with pytest.raises(ConfigError, match=r"trainer.weights.transport: nccl .*no CUDA GPU.*use the transport gloo"):
        create_transport(WeightsSection(transport="nccl"), WeightStore("127.0.0.1"), Path("unused"))
