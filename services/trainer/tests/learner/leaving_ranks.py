"""One rank of `test_ranks_end_right_after_a_collective`: the sequence that can hang torch's own way of leaving."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from quartet_trainer.launch import leave_process
from quartet_trainer.learner import distributed


def collective() -> None:
    dist.broadcast(torch.zeros(1), src=0)


def main() -> None:
    torch.set_num_threads(1)
    rank, store, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    for turn in range(rounds):
        dist.init_process_group("gloo", init_method=f"file://{store}-{turn}", rank=rank, world_size=2)
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        collective()
        distributed.shutdown()
        del model
    leave_process(0)


if __name__ == "__main__":
    main()
