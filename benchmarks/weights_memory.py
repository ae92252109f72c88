"""Memory that rank 0 of a trainer needs beyond its own when weights leave it.

A model of 1 GB in float32 on two ranks with `torch_fsdp`, each with half of it. The figure is the peak increase of rank
0's resident memory while every tensor is gathered and packed into buckets: with `trainer.weights.overlap = false`,
which sends from a few reused buckets, and with `overlap = true`, which sends from a copy of the model. The transport's
own memory is not included. The limit: this rank's half of the model and two buckets.
"""

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measuring import ROOT, Figure, report

sys.path.extend([f"{ROOT}/services/trainer/tests", f"{ROOT}/services/trainer/tests/learner"])

from learner_helpers import Run, make_model
from memory import resident
from processes import FORKS, Forked
from quartet.v1 import rollout_pb2

from quartet_common.ports import free_port
from quartet_common.weights import plan_buckets
from quartet_trainer.config import WeightsSection
from quartet_trainer.launch import leave_process
from quartet_trainer.learner import LearnerSettings, create_learner
from quartet_trainer.weight_sync.transports import Packer

RANKS = 2
MIB = 2**20


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model"
        size = make_large_model(path)
        with forked_ranks(RANKS, Path(name), work, path) as ranks:
            _, ours = ranks[0]
            assert ours.poll(240), ranks[0][0].said()[-3000:]
            found = ours.recv()
            assert [rank.wait(60) for rank, _ in ranks] == [0] * RANKS, [rank.said()[-3000:] for rank, _ in ranks]
    limit = size / RANKS + 2 * WeightsSection().bucket_bytes / MIB
    report(
        *(
            Figure(
                f"weights_memory: rank 0 of {RANKS}, {size:.0f} MiB of weights, {how}",
                "MiB",
                mib,
                limit,
                "limit",
                "lower",
            )
            for how, mib in found.items()
        )
    )


def make_large_model(folder: Path, dtype: torch.dtype = torch.float32) -> float:
    """Write it; return its MiB."""
    sizes = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 17}
    make_model(folder, dtype=dtype, **sizes, num_attention_heads=16, num_key_value_heads=16, initializer_range=0.02)
    return (folder / "model.safetensors").stat().st_size / MIB


@contextlib.contextmanager
def forked_ranks(count: int, folder: Path, target: Callable, *arguments: object) -> Iterator[list]:
    """Processes that run `target(*arguments, connection)` as ranks of one group, each with our end of its pipe."""
    port, ranks = free_port(), []
    try:
        for rank in range(count):
            ours, theirs = FORKS.Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
            variables = {name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()}
            log = folder / f"{'-'.join(map(str, arguments[1:]))}rank-{rank}"
            ranks.append((Forked(log, target, *arguments, theirs, environment=variables), ours))
        yield ranks
    finally:
        for rank, _ in ranks:
            rank.end()


def work(model: Path, said) -> None:
    """A rank: the same collectives on each, the memory of rank 0."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    learner = create_learner(LearnerSettings(plugin="torch_fsdp"), model, Run())
    manifest = plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, learner.weight_specs(), WeightsSection().bucket_bytes)
    packer, copier = Packer(manifest), Packer(manifest, copy=True)

    def straight() -> None:
        for _ in packer.pack(learner.weights):
            pass

    def copied() -> None:
        list(copier.pack(learner.weights))
        copier.checksums()

    found = {}
    for how, send in (("overlap = false", straight), ("overlap = true", copied)):
        gc.collect()
        before, _ = resident()
        Path("/proc/self/clear_refs").write_text("5")
        if rank:
            for _ in learner.weights():
                pass
        else:
            send()
        found[how] = resident()[1] - before
    if rank == 0:
        said.send(found)
    leave_process(0)


if __name__ == "__main__":
    main()
