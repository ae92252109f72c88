"""The weight transport, beside one flat Gloo broadcast of the same bytes between the same two processes.

Ours: the trainer's `Transfer` packs 300 float32 tensors into buckets of 64 MiB, broadcasts them and computes the
checksum, while the rollout's `WeightReceiver`, in a process of the rollout's environment, receives and checksums too.
The RPCs before and after a transfer are left out: they are some milliseconds, whatever the size.

Limit: one broadcast of one flat buffer of as many bytes, in the same process group, already packed, no checksum.

Both end when the receiving process says that it has everything. All buffers are reused, and touched before the first
measurement.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import ENVIRONMENTS, Figure, in_turn, process, report, seconds_of
from quartet.v1 import rollout_pb2, tensor_pb2

from quartet_common.weights import plan_buckets

TENSORS = 300
SIZES_MB = (50, 500)
ROUNDS = 7
BUCKET_BYTES = 64 << 20
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
    """Answer each line "ours MB" or "flat MB" on standard input with a line once that transfer is here."""
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
        flat_group.broadcast(flat, TIMEOUT_SECONDS)
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

    def ours(self) -> None:
        from quartet_trainer.publisher.transfer import Transfer

        self._tell("ours")
        # Without members nobody is called: what is left is the packing, the broadcast and the checksum.
        deadline = time.monotonic() + TIMEOUT_SECONDS
        transfer = Transfer("bench", 0, self._groups[0], {}, lambda _: True, deadline)
        transfer.run(self._manifest, self._packer, iter(self._weights.items()), rollout_pb2.PAUSE_MODE_KEEP, False)
        self._answer()

    def flat(self) -> None:
        self._tell("flat")
        wait = self._groups[1].broadcast(self._flat)
        wait(time.monotonic() + TIMEOUT_SECONDS, lambda: "")
        self._answer()

    def _tell(self, kind: str) -> None:
        print(kind, self._megabytes, file=self._receiver.stdin, flush=True)

    def _answer(self) -> None:
        if not self._receiver.stdout.readline():
            raise RuntimeError("the receiving process has ended")


def join_groups(store) -> list:
    """Meet the receiver in two groups, in its order: one for ours, one for flat broadcasts."""
    from quartet_trainer.publisher.group import WeightGroup

    groups: dict[int, WeightGroup] = {}
    for epoch in (1, 0):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        groups[epoch] = WeightGroup(epoch, {}, dist.ProcessGroupGloo(store.epoch(epoch, SECRET), 0, 2, options))
    return [groups[0], groups[1]]


def main() -> None:
    from quartet_trainer.publisher.group import WeightStore

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
            for megabytes in SIZES_MB:
                sides = Sides(receiver, groups, megabytes)
                rates = in_turn(
                    lambda sides=sides: sides.bytes / seconds_of(sides.ours) / 1e9,
                    lambda sides=sides: sides.bytes / seconds_of(sides.flat) / 1e9,
                    ROUNDS,
                )
                name = f"weights: {megabytes} MB in {TENSORS} tensors"
                figures.append(Figure(name, "GB/s", *rates, "one flat Gloo broadcast", "higher"))
    report(*figures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--receive-from", type=int, metavar="PORT")
    arguments = parser.parse_args()
    if arguments.receive_from:
        receive(arguments.receive_from)
    else:
        main()
