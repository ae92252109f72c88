"""Ranks that do jobs for the tests of plugins: forked once for all jobs; each leaves what it saw in a folder."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from learner_helpers import VOCABULARY, make_learner
from processes import Forked
from quartet.v1 import experience_pb2
from safetensors.torch import save_file

from quartet_common.ports import free_port
from quartet_trainer.batch import decode_groups
from quartet_trainer.launch import leave_process
from quartet_trainer.learner import distributed


def take_steps(learner: Any, batches: list[list]) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train on each batch: the critic's weights and moments at the end, and the steps' metrics."""
    metrics = [learner.train_step(groups) for groups in batches]
    return learner._critic.copies() if learner._critic else {}, metrics


def do(job: dict[str, Any], batches: list[list], out: Path, rank: int) -> None:
    """Load a checkpoint, take as many steps as the job says, save and export."""
    folder = out / job["name"]
    folder.mkdir(exist_ok=True)
    learner = make_learner(Path(job["model"]), **job["settings"])
    if job["resume"]:
        plan, *_ = learner._planner.updates(batch := decode_groups(batches[0], VOCABULARY), 0)
        # A pass without gradient before: nothing of the weights that it saw may stay.
        learner._planner._for_all_tokens(batch, plan, learner._plugin.log_probs)
        learner.load(out / job["resume"] / "checkpoint")
    critic, metrics = take_steps(learner, batches[: job["steps"]])
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    learner.snapshot(folder / "checkpoint", {})()
    if job["export"]:
        learner.export(folder / "export")
    if rank in (0, torch.distributed.get_world_size() - 1):
        save_file(critic, folder / f"critic-{rank}.safetensors")
        save_file(weights, folder / f"weights-{rank}.safetensors")
        specs = {name: list(shape) for name, _, shape in learner.weight_specs()}
        seen = {"metrics": metrics, "specs": specs}
        (folder / f"seen-{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


def work_of(
    rank: int, world: int, port: int, out: Path, jobs: list[dict[str, Any]], batches: list[list[bytes]]
) -> None:
    """A rank: all jobs, one after the other."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    distributed.initialize(seed=0)
    decoded = [[experience_pb2.GroupTensors.FromString(group) for group in groups] for groups in batches]
    for job in jobs:
        do(job, decoded, out, rank)
    leave_process(0)


def run_ranks(out: Path, ranks: int, jobs: list[dict[str, Any]], batches: list[list], seconds: float = 500) -> None:
    """Have so many ranks do the jobs; what they leave is in `out`. The first that fails is shown, the others end."""
    port, encoded = free_port(), [[group.SerializeToString() for group in groups] for groups in batches]
    errors = [out / f"rank-{rank}.stderr" for rank in range(ranks)]
    started = [Forked(errors[rank], work_of, rank, ranks, port, out, jobs, encoded) for rank in range(ranks)]
    running, deadline = {one.process.sentinel: one for one in started}, time.monotonic() + seconds
    try:
        while running and (ended := wait(list(running), deadline - time.monotonic())):
            for sentinel in ended:
                one = running.pop(sentinel)
                assert one.wait() == 0, one.said()[-6000:]
        assert not running, f"the ranks did not end in {seconds:g} s"
    finally:
        for one in started:
            one.end()
