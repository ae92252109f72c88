"""The weight transport, beside the limits of this machine and the way of the peers, between the same two processes.

Ours: the trainer's `Transfer` packs 300 float32 tensors into buckets, broadcasts them and computes the checksum, while
the rollout's `WeightReceiver`, in a process of the rollout's environment, receives and checksums too. The RPCs before
and after a transfer are left out: they are some milliseconds, whatever the size.

Beside it, all in the same process groups and in turn:
  flat        one broadcast of one flat buffer of as many bytes, already packed, no checksum: the limit of Gloo
  per tensor  one broadcast for each of the tensors, no packing, no checksum: what TRL, OpenRLHF and verl's first way do
  memcpy      a copy of as many bytes within the trainer's process: the limit of the memory
All end when the receiving process says that it has everything. Buffers are reused, and touched before the first
measurement.

`--size MB` measures one size only; 2000 needs 8 GB of memory and is not measured by default.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from measuring import ENVIRONMENTS, Figure, in_turn, process, report, seconds_of
from quartet.v1 import rollout_pb2, tensor_pb2

from quartet_common.weights import plan_buckets

TENSORS = 300
SIZES_MB = (50, 500)
ROUNDS = 7
BUCKET_BYTES = 16 << 20  # the default of trainer.weights.bucket_bytes
TIMEOUT_SECONDS = 60.0
SECRET = b"benchmark"


def shapes(megabytes: int) -> list[tuple[str, int, tuple[int, ...]]]:
    """Equal tensors: name, Dtype, shape."""
    columns = megabytes * 1_000_000 // TENSORS // 4 // 128
    return [(f"layers.{index}.weight", tensor_pb2.DTYPE_FLOAT32, (128, columns)) for index in range(TENSORS)]


def plan(megabytes: int) -> rollout_pb2.WeightManifest:
    return plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, shapes(megabytes), BUCKET_BYTES)


# --- The rollout's side, in its own environment -----------------------------------------------------------------------


def receive(port: int) -> None:
    """Answer each line "ours MB", "flat MB" or "tensors MB" on standard input with a line once it is here."""
    from quartet_rollout.engines.base import WeightGroupInfo
    from quartet_rollout.weights.gloo import GlooGroup
    from quartet_rollout.weights.receiver import WeightReceiver

    def info(epoch: int) -> WeightGroupInfo:
        return WeightGroupInfo("gloo", "127.0.0.1", port, 1, 2, TIMEOUT_SECONDS, SECRET, epoch)

    receiver, flat_group = WeightReceiver(), GlooGroup(info(1))
    receiver.join(info(0))
    flats: dict[str, torch.Tensor] = {}
    print("joined", flush=True)
    for line in sys.stdin:
        kind, megabytes = line.split()
        if kind == "ours":
            print(receiver.receive(plan(int(megabytes)), TIMEOUT_SECONDS), flush=True)
            continue
        size = sum(plan(int(megabytes)).bucket_bytes)
        flat = flats.setdefault(megabytes, torch.empty(size, dtype=torch.uint8))
        if kind == "flat":
            flat_group.broadcast(flat, TIMEOUT_SECONDS)
        else:
            for piece in flat[: size // TENSORS * TENSORS].chunk(TENSORS):
                flat_group.broadcast(piece, TIMEOUT_SECONDS)
        print("received", flush=True)


# --- The trainer's side -----------------------------------------------------------------------------------------------


class Sides:
    """Rank 0, and a way to tell the other process what comes."""

    def __init__(self, receiver: subprocess.Popen, groups: list, megabytes: int):
        from quartet_trainer.publisher.packing import Packer

        self._receiver, self._groups, self._megabytes = receiver, groups, megabytes
        self._manifest = plan(megabytes)
        self._packer = Packer(self._manifest)
        self._weights = {name: torch.randn(shape) for name, _, shape in shapes(megabytes)}
        self.bytes = sum(self._manifest.bucket_bytes)
        self._flat = torch.zeros(self.bytes, dtype=torch.uint8)
        self._copy = torch.zeros(self.bytes, dtype=torch.uint8)

    def ours(self) -> None:
        from quartet_trainer.publisher.group import WeightGroup
        from quartet_trainer.publisher.transfer import Transfer

        self._tell("ours")
        # Without members nobody is called: what is left is the packing, the broadcast and the checksum.
        group, deadline = WeightGroup(0, {}, self._groups[0]), time.monotonic() + TIMEOUT_SECONDS
        Transfer("bench", 0, group, {}, lambda _: True, deadline, self._packer, self._tensors).run()
        self._answer()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.items()

    def flat(self) -> None:
        self._tell("flat")
        self._groups[1].send(self._flat)(lambda: None)
        self._answer()

    def per_tensor(self) -> None:
        self._tell("tensors")
        for piece in self._flat[: self.bytes // TENSORS * TENSORS].chunk(TENSORS):
            self._groups[1].send(piece)(lambda: None)
        self._answer()

    def memcpy(self) -> None:
        self._copy.copy_(self._flat)

    def _tell(self, kind: str) -> None:
        print(kind, self._megabytes, file=self._receiver.stdin, flush=True)

    def _answer(self) -> None:
        if not self._receiver.stdout.readline():
            raise RuntimeError("the receiving process has ended")


def join_groups(store) -> list:
    """Meet the receiver in two groups, in its order: one for ours, one for the others."""
    from quartet_trainer.publisher.gloo import Gloo

    transport = Gloo(store)
    groups = {epoch: transport.meet(epoch, SECRET, 2, TIMEOUT_SECONDS) for epoch in (1, 0)}
    return [groups[0], groups[1]]


def figures_of(sides: Sides, megabytes: int, rounds: int) -> list[Figure]:
    """Measure ours beside each of the others, in turn."""
    others = {
        "one flat Gloo broadcast": sides.flat,
        "one broadcast for each tensor": sides.per_tensor,
        "memcpy": sides.memcpy,
    }
    figures = []
    for name, other in others.items():
        rates = in_turn(
            lambda: sides.bytes / seconds_of(sides.ours) / 1e9,
            lambda other=other: sides.bytes / seconds_of(other) / 1e9,
            rounds if other == sides.flat else 3,
        )
        figures.append(Figure(f"weights: {megabytes} MB in {TENSORS} tensors", "GB/s", *rates, name, "higher"))
    return figures


def main(sizes: Sequence[int]) -> None:
    from quartet_trainer.publisher.store import WeightStore

    store = WeightStore("127.0.0.1")
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "receiver.log"
        command = [str(ENVIRONMENTS / "rollout" / "bin" / "python"), __file__, "--receive-from", str(store.port)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with process(command, log, **pipes) as receiver:
            groups = join_groups(store)
            if receiver.stdout.readline() != "joined\n":
                raise RuntimeError(f"the receiving process did not join: {log.read_text()[-2000:]}")
            for megabytes in sizes:
                rounds = ROUNDS if megabytes <= 500 else 3
                figures += figures_of(Sides(receiver, groups, megabytes), megabytes, rounds)
    report(*figures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--receive-from", type=int, metavar="PORT")
    parser.add_argument("--size", type=int, metavar="MB")
    arguments = parser.parse_args()
    if arguments.receive_from:
        receive(arguments.receive_from)
    else:
        main([arguments.size] if arguments.size else SIZES_MB)
