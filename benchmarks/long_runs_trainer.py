"""The trainer service with a learner that learns nothing, for `long_runs.py`; in the trainer's environment.

All else is the trainer's own: its loop, session, ledger, checkpoints and records. The learner reports every metric that
a real one does, and its checkpoint is a small file.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quartet.v1 import experience_pb2

from quartet_common.checkpoints import read_manifest
from quartet_trainer import training_run
from quartet_trainer.__main__ import main
from quartet_trainer.batch import decode_group
from quartet_trainer.checkpoints import atomic_folder
from quartet_trainer.learner.metrics import METRICS

WEIGHTS = b"w" * 4096
VOCABULARY = 150_000  # of groups.py


class StandIn:
    """What `TrainingLoop` and its parts use of a learner."""

    step = undone = parameters = 0
    announcements = lora = None
    checkpoint_bytes = len(WEIGHTS)

    def __init__(self, config: Any):
        print(f"created at {time.time()}", flush=True)

    def idle(self) -> None: ...

    def stop(self) -> None: ...

    def weight_specs(self) -> list:
        return []

    def weights(self) -> Iterator:
        return iter(())

    def check_group(self, group: experience_pb2.GroupTensors) -> None:
        decode_group(group, VOCABULARY)

    def train_step(self, groups: Sequence[experience_pb2.GroupTensors]) -> dict[str, float]:
        self.step += 1
        return {name: float(len(groups)) for name, metric in METRICS.items() if not metric.only_with}

    def snapshot(self, folder: Path, facts: dict[str, Any]) -> Callable[[], None]:
        manifest = {**facts, "step": self.step}

        def write() -> None:
            with atomic_folder(folder, manifest) as writing:
                (writing / "weights").write_bytes(WEIGHTS)

        return write

    def load(self, folder: Path) -> None:
        self.step = read_manifest(folder)["step"]

    def export(self, folder: Path) -> None:
        folder.mkdir()


if __name__ == "__main__":
    training_run.load_learner = StandIn
    sys.exit(main())
