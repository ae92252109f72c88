"""The best checkpoint by an evaluation's metric, and when a run has stopped getting better. Imports no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEST_FILE = "best.json"


@dataclass(frozen=True)
class Best:
    """The best value so far and the checkpoint that has it."""

    metric: str
    value: float
    step: int
    """Optimizer steps in the weights that were evaluated."""


def better(value: float, than: float, mode: str, min_delta: float = 0.0) -> bool:
    """Whether `value` is better by more than `min_delta` (>= 0); `mode`: "max" or "min"."""
    return value > than + min_delta if mode == "max" else value < than - min_delta


def read_best(root: Path) -> Best | None:
    """What `write_best` wrote under `root`; None if there is nothing, or nothing that can be read."""
    try:
        return Best(**json.loads((root / BEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_best(root: Path, best: Best) -> None:
    """Write `root`/best.json, whole or not at all. Raises OSError."""
    aside = root / f".{BEST_FILE}.writing"
    with aside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(best)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, root / BEST_FILE)


@dataclass
class EarlyStopping:
    """Counts evaluations without improvement; its state belongs into the checkpoint."""

    mode: str
    patience: int
    """Evaluations in a row that may be no better."""
    min_delta: float
    best: float | None = None
    bad: int = 0
    last_step: int = -1

    def exhausted_by(self, step: int, value: float) -> bool:
        """Take in the evaluation of `step`; True if it was one too many. The same step counts once."""
        if step > self.last_step:
            self.last_step = step
            if self.best is None or better(value, self.best, self.mode, self.min_delta):
                self.best, self.bad = value, 0
            else:
                self.bad += 1
        return self.bad >= self.patience

    def to_json(self) -> dict[str, Any]:
        """Return what `restore` takes."""
        return {"best": self.best, "bad": self.bad, "last_step": self.last_step}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to what `to_json` gave."""
        self.best, self.bad, self.last_step = saved["best"], saved["bad"], saved["last_step"]
