"""Notices a rank that has hung: it works, and does no part of the work. A rank above 0 also looks after rank 0."""

import os
from collections.abc import Callable, Hashable
from contextlib import suppress

import psutil

from quartet_server import metrics, stall
from quartet_trainer import launch
from quartet_trainer.progress import PROGRESS
from quartet_trainer.status import Status, phase_name

_STALLED = metrics.gauge(
    "quartet_trainer_stalled_seconds",
    "Time without a part of the work done, while the trainer works; 0: it goes on.",
    ["run"],
)
_STALL_LIMIT = metrics.gauge(
    "quartet_trainer_stall_limit_seconds", "Time without a part of the work done after which the trainer ends.", ["run"]
)
FIRST_STEP_SECONDS = 1800.0
"""Added by default until the first step is trained: it compiles, and connects the ranks."""


class StallWatch(stall.StallWatch):
    """Watches this rank."""

    def __init__(self, rank: int, status: Status, seconds: float | None, on_stall: Callable[[str], None]):
        super().__init__(seconds, on_stall, _STALLED.labels(status.run_id), _STALL_LIMIT.labels(status.run_id))
        self._rank, self._status = rank, status
        self._parent = psutil.Process(started_by) if rank and (started_by := launch.starter()) else None
        self._what = ""

    @property
    def limit(self) -> float:
        first = 0.0 if self._seconds or self._status.batches else FIRST_STEP_SECONDS
        return super().limit + self._status.allowed + first

    def look(self) -> Hashable | None:
        if self._parent is not None and os.getppid() != self._parent.pid:
            self._on_stall(f"rank {self._rank} ends: the process that started it has ended")
        with suppress(psutil.NoSuchProcess):
            if self._parent is not None and self._parent.status() == psutil.STATUS_STOPPED:
                self._what = "waits: the process that started it has been stopped"
                return self._what
        self._what = "has done no part of its work"
        return (PROGRESS.done, self._status.since) if self._status.works or PROGRESS.sending else None

    def report(self) -> str:
        return (
            f"rank {self._rank} {self._what} for {self.stalled:.1f} s in the phase {phase_name(self._status.phase)} "
            f"(by trainer.stall_seconds the limit is {self.limit:g}); all ranks end, to go on from the last checkpoint"
        )
