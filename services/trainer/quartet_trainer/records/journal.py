"""metrics.jsonl and TensorBoard: one line, one scalar per metric, for each step and evaluation."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from quartet_trainer.records.disk import writing


class Journal:
    """Writes `folder`/metrics.jsonl and `folder`/tensorboard; first cuts off what will be written again."""

    def __init__(self, folder: Path, first_step: int, tensorboard: bool = True):
        """`first_step`: the first that will be written; records of it and later ones were lost in a restart."""
        self._path = path = folder / "metrics.jsonl"
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            _cut_off(path, first_step)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        self._writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step if first_step else None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics. They stand at `step`, the batch's number from 0."""
        self._write({"kind": "step", "step": step, "policy_version": step + 1}, step, metrics)

    def evaluation(self, name: str, version: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation's metrics. They stand at `version`, the number of steps in the weights."""
        self._write({"kind": "evaluation", "set": name, "step": version, "policy_version": version}, version, metrics)

    def _write(self, head: dict[str, object], at: int, metrics: Mapping[str, float]) -> None:
        with writing(self._path):
            self._file.write(json.dumps({**head, "time": round(time.time(), 3), **metrics}) + "\n")
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, at)

    def close(self) -> None:
        """Flush and close both."""
        with contextlib.suppress(OSError):  # what is still in its buffer could not be written, as was said
            self._file.close()
        if self._writer is not None:
            self._writer.close()


def _cut_off(path: Path, first_step: int) -> None:
    """Remove the records that steps from `first_step` on will write again, and a line that a kill left unfinished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        done_at = record["step"] + 1 if record["kind"] == "step" else record["step"]
        if done_at <= first_step:
            kept.append(line)
    aside = path.with_suffix(".jsonl.writing")
    aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(aside, path)
