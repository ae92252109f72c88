"""Ranks come and go without hanging, and those of a host load the model one after another."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learner_helpers import Run, make_model, settings
from processes import FORKS, Forked
from torch.nn.parallel import DistributedDataParallel

from quartet_common.ports import free_port
from quartet_trainer.launch import leave_process
from quartet_trainer.learner import create_learner, distributed
from quartet_trainer.learner.learner import BoosterLearner


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


SIZES = {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 12288, "num_hidden_layers": 2}


def rank_of_two(rank: int, port: int, model: Path, parent: Connection) -> None:
    """Asks when it begins, and with the whole model in memory."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    load = BoosterLearner._load

    def watched(learner: BoosterLearner, dtype: torch.dtype, *, frozen: bool = False):
        loaded = load(learner, dtype, frozen=frozen)
        parent.send(rank)
        assert parent.recv() == "go on"
        return loaded

    BoosterLearner._load = watched
    parent.send(rank)
    assert parent.recv() == "go on"
    create_learner(settings(plugin="torch_fsdp", precision="fp32", kl_coefficient=0.1), model, Run())
    parent.send(rank)
    assert parent.recv() == "go on"
    leave_process(0)


def own_memory(process: int) -> int:
    """Bytes of a process that are no file's."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.timeout(300)
def test_two_ranks_never_hold_two_models(tmp_path: Path) -> None:
    """Policy, then reference model: each rank keeps half of both, and what else is held at a time is one. Matrices are
    large enough for malloc to give them back."""
    path = make_model(tmp_path / "model", dtype=torch.bfloat16, num_attention_heads=8, num_key_value_heads=8, **SIZES)
    size = 2 * (path / "model.safetensors").stat().st_size  # in float32
    port, pipes = free_port(), [FORKS.Pipe() for _ in range(2)]
    ranks = [Forked(tmp_path / f"stderr-{n}", rank_of_two, n, port, path, pipes[n][1]) for n in (0, 1)]
    try:
        ours = [pipe[0] for pipe in pipes]
        assert all(one.poll(100) and one.recv() == n for n, one in enumerate(ours)), [rank.said() for rank in ranks]
        before = sum(own_memory(rank.process.pid) for rank in ranks)
        for one in ours:
            one.send("go on")
        held = []
        for n in (0, 1, 0, 1):  # policies in turn, then reference models in turn
            assert ours[n].poll(100), ranks[n].said()
            assert ours[n].recv() == n and not ours[1 - n].poll(0)
            held.append((sum(own_memory(rank.process.pid) for rank in ranks) - before) / size)
            ours[n].send("go on")
        for n, one in enumerate(ours):
            assert one.poll(100) and one.recv() == n, ranks[n].said()
            one.send("go on")
        assert [rank.wait(60) for rank in ranks] == [0, 0], [rank.said() for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    for found, models in zip(held, (1, 1, 2, 2.5), strict=True):
        assert found < models + 0.3, held
