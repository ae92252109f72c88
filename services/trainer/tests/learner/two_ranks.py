"""One rank of `test_invariance.run_two_ranks`: trains the job and leaves what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from learner_helpers import Run, gradients, settings
from quartet.v1 import experience_pb2
from safetensors.torch import save_file

from quartet_trainer.launch import leave_process
from quartet_trainer.learner import create_learner, distributed


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    job = json.loads((out / "job.json").read_text(encoding="utf-8"))
    batches = [
        [experience_pb2.GroupTensors.FromString(bytes.fromhex(group)) for group in groups] for groups in job["batches"]
    ]
    ranks = distributed.initialize(seed=0)
    assert ranks.world_size == 2
    for name, values in job["settings"].items():
        folder = out / name
        learner = create_learner(settings(**values), Path(job["model"]), Run())
        save_file(gradients(learner, batches[0]), folder / f"gradient-{ranks.rank}.safetensors")
        metrics = [learner.train_step(groups) for groups in batches]
        (folder / f"metrics-{ranks.rank}.json").write_text(json.dumps(metrics), encoding="utf-8")
        weights = {name: tensor.clone() for name, tensor in learner.weights()}
        save_file(weights, folder / f"weights-{ranks.rank}.safetensors")

        learner.save(folder / "checkpoint", {"rank": ranks.rank})
        assert learner.load(folder / "checkpoint") == {"rank": 0}
        learner.export(folder / "export")
    distributed.shutdown()
    leave_process(0)


if __name__ == "__main__":
    main()
