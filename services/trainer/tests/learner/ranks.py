"""Ranks that do jobs for the tests of plugins: forked once for all jobs; each leaves what it saw in a folder."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from learner_helpers import VOCABULARY, Run, all_parameters, settings
from processes import Forked
from quartet.v1 import experience_pb2
from safetensors.torch import save_file

from quartet_common.ports import free_port
from quartet_trainer.batch import decode_groups
from quartet_trainer.launch import leave_process
from quartet_trainer.learner import create_learner, distributed


def standing_gradients(plugin: Any) -> dict[str, torch.Tensor]:
    """The gradients that have been accumulated, whole, by name."""
    zero = getattr(plugin, "_rows", None)
    rows = {id(parameter): row for parameter, row in zero.gradients()} if zero else {}

    def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
        return zero.join(rows[id(parameter)], parameter.shape) if zero else parameter.grad

    if plugin.settings.plugin == "hybrid_parallel":
        return {
            name: plugin._shards.whole(name, lambda each: gradient(each).to(plugin.dtype), plugin.dtype).clone()
            for name in plugin.specs
        }
    if plugin.settings.plugin == "torch_fsdp":
        return {name: plugin._whole(name, parameter.grad) for name, parameter in plugin.parameters()}
    if plugin.settings.plugin == "gemini":
        return {name: plugin._whole(name, gemini_gradient(plugin, name)) for name in plugin.specs}
    return {name: gradient(parameter).clone() for name, parameter in all_parameters(plugin)}


def gemini_gradient(plugin: Any, name: str) -> torch.Tensor | None:
    """This rank's range of it, in the chunk of gradients."""
    if name not in plugin._held:
        return None
    begin, end = plugin.optimizer.param_to_range[plugin._held[name]]
    return plugin.optimizer.param_to_chunk16[plugin._held[name]].grad_chunk.payload[begin:end]


def watch_steps(learner: Any, batches: list[list]) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train on each batch: the gradients of the first two steps, "0/NAME", "1/NAME", with several updates a step those
    of the last, the critic's weights and moments at the end, "critic/…", and the steps' metrics."""
    found: dict[str, torch.Tensor] = {}
    metrics: list[dict[str, float]] = []
    clip = learner._plugin.clip_gradient

    def watch(max_norm: float) -> float:
        if len(metrics) < 2:
            found.update({f"{len(metrics)}/{name}": g for name, g in standing_gradients(learner._plugin).items()})
        return clip(max_norm)

    learner._plugin.clip_gradient = watch
    for groups in batches:
        metrics.append(learner.train_step(groups))
    if learner._critic:
        found |= {f"critic/{name}": tensor for name, tensor in learner._critic.copies().items()}
    return found, metrics


def do(job: dict[str, Any], batches: list[list], out: Path, rank: int) -> None:
    """Load a checkpoint, take as many steps as the job says, save and export."""
    folder = out / job["name"]
    folder.mkdir(exist_ok=True)
    learner = create_learner(settings(**job["settings"]), Path(job["model"]), Run())
    if job["resume"]:
        plan, *_ = learner._planner.plan(batch := decode_groups(batches[0], VOCABULARY))
        # A pass without gradient before: nothing of the weights that it saw may stay.
        learner._planner._of_all(batch, plan, learner._plugin.log_probs)
        assert learner.load(out / job["resume"] / "checkpoint") == {"saved": job["resume"]}
    gradients, metrics = watch_steps(learner, batches[: job["steps"]])
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    learner.save(folder / "checkpoint", {"saved": job["name"]})
    if job["export"]:
        learner.export(folder / "export")
    if rank in (0, torch.distributed.get_world_size() - 1):
        save_file(gradients, folder / f"gradients-{rank}.safetensors")
        save_file(weights, folder / f"weights-{rank}.safetensors")
        specs = {name: list(shape) for name, _, shape in learner.weight_specs()}
        held = sum(parameter.numel() for _, parameter in learner._plugin.parameters())
        seen = {"metrics": metrics, "specs": specs, "held": held}
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
