"""Notices a rank of the trainer that has hung: it works, and does no part of the work for too long.

Parts are micro-batches, gathered tensors and changes of the phase. Nothing is expected while the trainer waits for a
batch, for rollouts, for the broker or for space on the disk. Ranks above 0 also notice that rank 0 is stopped or gone.
"""

import contextlib
import os
from collections.abc import Callable, Hashable

import psutil

from quartet_common import metrics, stall
from quartet_trainer.progress import PROGRESS
from quartet_trainer.status import Status, phase_name

STALLED = metrics.gauge(
    "quartet_trainer_stalled_seconds", "Time without a part of the work done, while the trainer works; 0: it goes on."
)
STALL_LIMIT = metrics.gauge(
    "quartet_trainer_stall_limit_seconds", "Time without a part of the work done after which the trainer ends."
)
FIRST_STEP_SECONDS = 1800.0
"""The least limit until the first step is trained: it compiles, and connects the ranks."""


class StallWatch(stall.StallWatch):
    """Watches this rank."""

    def __init__(self, rank: int, status: Status, seconds: float | None, on_stall: Callable[[str], None]):
        """`seconds`: `trainer.stall_seconds`."""
        super().__init__(seconds, on_stall, STALLED, STALL_LIMIT)
        self._rank, self._status = rank, status
        self._parent = psutil.Process(os.getppid()) if rank else None  # rank 0, or torchrun's agent
        self._what = ""

    @property
    def least(self) -> float:
        return stall.LEAST_SECONDS if self._status.batches else FIRST_STEP_SECONDS

    @property
    def limit(self) -> float:
        return super().limit + self._status.allowed

    def look(self) -> Hashable | None:
        if self._parent is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                if self._parent.status() == psutil.STATUS_STOPPED:
                    self._what = f"rank {self._rank} waits: the process that started it has been stopped"
                    return self._what
            if os.getppid() != self._parent.pid:
                self._on_stall(f"rank {self._rank} ends: the process that started it has ended")
        self._what = f"rank {self._rank} has done no part of its work"
        return (PROGRESS.done, self._status.entered) if self._status.works or PROGRESS.expected else None

    def report(self) -> str:
        limit = self.limit - self._status.allowed
        more = f" and {self._status.allowed:.0f} for this phase" if self._status.allowed else ""
        return (
            f"{self._what} for {self.stalled:.1f} s in the phase {phase_name(self._status.phase)} "
            f"(trainer.stall_seconds is {limit:g}{more}); it ends, to go on from the last checkpoint"
        )
