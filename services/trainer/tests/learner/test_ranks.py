"""Ranks come and go without hanging, and those of a host load the model one after another."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from processes import Forked
from torch.nn.parallel import DistributedDataParallel

from quartet_trainer.launch import leave_process
from quartet_trainer.learner import distributed


def collective() -> None:
    dist.broadcast(torch.zeros(1), src=0)


def come_and_go(rank: int, store: Path, rounds: int) -> None:
    """The sequence that can hang torch's own way of leaving."""
    for turn in range(rounds):
        dist.init_process_group("gloo", init_method=f"file://{store}-{turn}", rank=rank, world_size=2)
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        collective()
        distributed.shutdown()
        del model
    leave_process(0)


def test_ranks_end_right_after_a_collective(tmp_path: Path) -> None:
    """Without `distributed.shutdown`'s care this hangs within a few rounds."""
    ranks = [Forked(tmp_path / f"stderr-{rank}", come_and_go, rank, tmp_path / "store", 10) for rank in (0, 1)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.end()
