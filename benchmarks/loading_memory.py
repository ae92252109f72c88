"""Memory of a host while the ranks of a trainer load a model, beside what they hold afterwards and the model once.

Four ranks load a model of 481 MiB in bfloat16, 961 MiB in float32, with each plugin. The figure is the increase of the
sum of their proportional set sizes (a page that several processes map counts once), sampled every 20 ms until all have
loaded. The limit: what the ranks hold in the end, plus one model in float32.
"""

import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from measuring import ROOT, Figure, report
from weights_memory import MIB, forked_ranks, make_large_model

sys.path.extend([f"{ROOT}/services/trainer/tests", f"{ROOT}/services/trainer/tests/learner"])

from learner_helpers import Run

from quartet_trainer.launch import leave_process
from quartet_trainer.learner import LearnerSettings, create_learner, distributed

RANKS = 4
SETTINGS = {
    "torch_ddp": {},
    "low_level_zero": {"precision": "bf16"},
    "torch_fsdp": {},
    "gemini": {},
    "hybrid_parallel": {"tp_size": 2, "pp_size": 2},
}
SECONDS = 240.0


def main() -> None:
    figures = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model"
        size = 2 * make_large_model(path, torch.bfloat16)
        for plugin in sys.argv[1:] or SETTINGS:
            peak, held = measure(Path(name), path, plugin)
            what = f"loading_memory: {RANKS} ranks, {size:.0f} MiB of weights, {plugin}"
            figures.append(Figure(what, "MiB", peak, held + size, f"{held:,.0f} MiB held, and the model", "lower"))
            print(figures[-1], file=sys.stderr, flush=True)
    report(*figures)


def measure(folder: Path, model: Path, plugin: str) -> tuple[float, float]:
    """The greatest sum of PSS while the ranks load, and that when all have loaded, in MiB."""
    with forked_ranks(RANKS, folder, load, model, plugin) as ranks:
        for rank, ours in ranks:
            assert ours.poll(SECONDS) and ours.recv() == "ready", rank.said()[-3000:]
        before = peak = pss(ranks)
        for _, ours in ranks:
            ours.send("load")
        deadline, waiting = time.monotonic() + SECONDS, [ours for _, ours in ranks]
        while waiting:
            assert time.monotonic() < deadline, ranks[0][0].said()[-3000:]
            assert all(rank.poll() is None for rank, _ in ranks), [rank.said()[-2000:] for rank, _ in ranks]
            peak = max(peak, pss(ranks))
            waiting = [ours for ours in waiting if not ours.poll(0.02 / len(waiting))]
        return peak - before, pss(ranks) - before


def pss(ranks: list) -> float:
    """The sum of their proportional set sizes, in MiB."""
    return sum(psutil.Process(rank.process.pid).memory_full_info().pss for rank, _ in ranks) / MIB


def load(model: Path, plugin: str, said) -> None:
    torch.set_num_threads(1)
    distributed.initialize(seed=0)
    said.send("ready")
    said.recv()
    learner = create_learner(LearnerSettings(plugin=plugin, **SETTINGS[plugin]), model, Run())
    said.send("loaded")
    time.sleep(SECONDS)
    leave_process(int(learner.step))


if __name__ == "__main__":
    main()
