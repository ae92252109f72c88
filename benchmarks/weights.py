"""The weight transport, beside the limits of this machine and the way of the peers, between the same two processes.

Ours: the trainer's transport broadcasts 300 float32 tensors from its packed copy, the default, while the rollout's
`WeightReceiver`, in a process of the rollout's environment, receives and checksums them. The copy and its checksum are
made before an update begins, while rollouts generate; their cost is a separate figure. With `weights.overlap = false`
there is no copy: tensors are packed and checksummed while they are sent, which is measured too. The RPCs before and
after a transfer are not measured: they take some milliseconds at any size.

The peers, in the same process groups and in turn:
  flat        one broadcast of one flat buffer of as many bytes, already packed, no checksum: the limit of Gloo
  per tensor  one broadcast for each tensor, no packing, no checksum: as TRL, OpenRLHF and verl's first method
  memcpy      a copy of as many bytes within the trainer's process: the limit of the memory
Each measurement ends when the receiving process reports that it has everything. Buffers are reused, and touched before
the first measurement. Standard error has the CPU time of both processes, without the kernel's softirqs.

`--size MB` measures one size only. 2000 needs 11 GB of memory.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from measuring import ENVIRONMENTS, Figure, Side, in_turn, report, seconds_of
from quartet.v1 import rollout_pb2, tensor_pb2

from quartet_common.weights import plan_buckets

TENSORS = 300
SIZES_MB = (50, 500, 2000)
ROUNDS = 9
TIMEOUT_SECONDS = 60.0
SECRET = b"benchmark"


def shapes(megabytes: int) -> list[tuple[str, int, tuple[int, ...]]]:
    """Equal tensors: name, Dtype, shape."""
    columns = megabytes * 1_000_000 // TENSORS // 4 // 128
    return [(f"layers.{index}.weight", tensor_pb2.DTYPE_FLOAT32, (128, columns)) for index in range(TENSORS)]


def plan(megabytes: int, bucket_bytes: int) -> rollout_pb2.WeightManifest:
    return plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, shapes(megabytes), bucket_bytes)


# --- The rollout's side, in its own environment -----------------------------------------------------------------------


def receive(ports: Sequence[int], bucket_bytes: int) -> None:
    """Answer each {"way": "ours", "flat" or "tensors", "megabytes"} once it is here, with the CPU seconds of that."""
    from quartet_rollout.engines.base import WeightGroupInfo
    from quartet_rollout.weight_sync.receiver import GroupTransport, WeightReceiver

    def info(epoch: int) -> WeightGroupInfo:
        return WeightGroupInfo("gloo", "127.0.0.1", ports[epoch], 1, 2, TIMEOUT_SECONDS, SECRET, epoch)

    receiver, flat_group = WeightReceiver(""), GroupTransport(info(1)).group

    def wait() -> None:
        while (end := receiver.poll()) is None:
            time.sleep(0.001)
        assert not end[0], end[1]

    receiver.begin_join(asdict(info(0)), [])
    wait()
    flat, manifests = torch.empty(0), {}
    print(json.dumps("joined"), flush=True)
    for kind, megabytes in (json.loads(line).values() for line in sys.stdin):
        manifest = manifests.setdefault(megabytes, plan(megabytes, bucket_bytes))
        size, began = sum(manifest.bucket_bytes), time.process_time()
        if kind == "ours":
            receiver.begin_receive(manifest.SerializeToString(), TIMEOUT_SECONDS, "")
            wait()
        else:
            if flat.numel() != size:
                flat = torch.empty(size, dtype=torch.uint8)
            pieces = [flat] if kind == "flat" else flat[: size // TENSORS * TENSORS].chunk(TENSORS)
            list(flat_group.broadcast(pieces, time.monotonic() + TIMEOUT_SECONDS))
        print(time.process_time() - began, flush=True)


# --- The trainer's side -----------------------------------------------------------------------------------------------


class Sides:
    """Rank 0, and a way to tell the other process what comes."""

    def __init__(self, receiver: Side, transports: Sequence, groups: list, megabytes: int, bucket_bytes: int):
        from quartet_trainer.weight_sync.transports import Packer

        self._receiver, self._groups, self._megabytes = receiver, groups, megabytes
        self._transport = transports[0]
        self._manifest = plan(megabytes, bucket_bytes)
        self._packer, self._copier = Packer(self._manifest), Packer(self._manifest, copy=True)
        self._copy: list[torch.Tensor] = []
        self._weights = {name: torch.randn(shape) for name, _, shape in shapes(megabytes)}
        self.bytes = sum(self._manifest.bucket_bytes)
        self._flat = torch.zeros(self.bytes, dtype=torch.uint8)
        self._began = 0.0
        self.cpu_seconds: dict[str, list[float]] = {}
        """Of both processes, by way."""

    def copy(self) -> None:
        """What happens before an update begins."""
        self._copy = list(self._copier.pack(self._tensors))
        self._copier.checksums()

    def ours(self) -> None:
        self._send("ours", self._copy, self._copier)

    def ours_without_copy(self) -> None:
        self._send("ours, no copy", self._packer.pack(self._tensors), self._packer)

    def _send(self, way: str, buckets: Iterable[torch.Tensor], packer) -> None:
        self._tell("ours")
        # Without the RPCs: only the broadcast, the checksum and, without overlap, the packing.
        self._groups[0].deadline = time.monotonic() + TIMEOUT_SECONDS
        self._transport.send(self._groups[0], buckets)
        packer.checksums()
        self._answer(way)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.items()

    def flat(self) -> None:
        self._tell("flat")
        self._broadcast(self._flat)
        self._answer("flat")

    def per_tensor(self) -> None:
        self._tell("tensors")
        for piece in self._flat[: self.bytes // TENSORS * TENSORS].chunk(TENSORS):
            self._broadcast(piece)
        self._answer("per tensor")

    def _broadcast(self, tensor: torch.Tensor) -> None:
        list(self._groups[1].process_group.broadcast([tensor], time.monotonic() + TIMEOUT_SECONDS))

    def memcpy(self) -> None:
        half = self.bytes // 2
        for _ in range(2):
            self._flat[half : 2 * half].copy_(self._flat[:half])

    def _tell(self, kind: str) -> None:
        self._began = time.process_time()
        self._receiver.send({"way": kind, "megabytes": self._megabytes})

    def _answer(self, way: str) -> None:
        self.cpu_seconds.setdefault(way, []).append(self._receiver.receive() + time.process_time() - self._began)


def join_groups(transports: Sequence) -> list:
    """Meet the receiver in two groups, in its order: one for ours, one for the others."""
    from quartet_trainer.weight_sync.rollouts import WeightGroup
    from quartet_trainer.weight_sync.transports import form_group

    groups = []
    for epoch in (1, 0):
        group = WeightGroup("bench", epoch, 2, TIMEOUT_SECONDS, {}, lambda _: True, secret=SECRET)
        form_group("gloo", transports[epoch], group)
        groups.insert(0, group)
    return groups


def figures_of(sides: Sides, megabytes: int, rounds: int) -> list[Figure]:
    """Measure ours beside the others, in turn."""
    sides.copy()  # it touches the memory
    title = f"weights: {megabytes} MB in {TENSORS} tensors"
    flat = "one flat Gloo broadcast"
    pairs = [
        (title, sides.ours, flat, sides.flat, rounds),
        (f"{title}, packed while sent", sides.ours_without_copy, flat, sides.flat, rounds),
        (title, sides.ours, "one broadcast for each tensor", sides.per_tensor, 3),
        (title, sides.ours, "memcpy", sides.memcpy, 3),
        (f"{title}, copy and checksum beforehand", sides.copy, "memcpy", sides.memcpy, 3),
    ]
    figures = []
    for name, ours, peer, other, count in pairs:
        rates = in_turn(
            lambda ours=ours: sides.bytes / seconds_of(ours) / 1e9,
            lambda other=other: sides.bytes / seconds_of(other) / 1e9,
            count,
        )
        figures.append(Figure(name, "GB/s", *rates, peer, "higher"))
    for way, seconds in sides.cpu_seconds.items():
        print(f"{megabytes} MB, {way}: {statistics.median(seconds):.3f} s of CPU", file=sys.stderr)
    return figures


def main(sizes: Sequence[int], bucket_bytes: int) -> None:
    from quartet_trainer.weight_sync.transports import Broadcast

    transports = [Broadcast("gloo", "127.0.0.1") for _ in range(2)]
    figures = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        command = [str(ENVIRONMENTS / "rollout" / "bin" / "python"), __file__]
        command += [
            "--receive-from",
            *(str(transport.port) for transport in transports),
            "--bucket-bytes",
            str(bucket_bytes),
        ]
        receiver = Side(command, Path(folder) / "receiver.log", stack)
        groups = join_groups(transports)
        receiver.receive()
        for megabytes in sizes:
            rounds = ROUNDS if megabytes <= 500 else 5
            figures += figures_of(Sides(receiver, transports, groups, megabytes, bucket_bytes), megabytes, rounds)
    report(*figures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--receive-from", type=int, nargs=2, metavar="PORT")
    parser.add_argument("--size", type=int, metavar="MB")
    parser.add_argument("--bucket-bytes", type=int, default=32 << 20, help="default: trainer.weights.bucket_bytes'")
    arguments = parser.parse_args()
    if arguments.receive_from:
        receive(arguments.receive_from, arguments.bucket_bytes)
    else:
        main([arguments.size] if arguments.size else SIZES_MB, arguments.bucket_bytes)
