"""The queues of the reward service, in which runs take turns and whose waits are not part of a verification."""

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from quartet_reward import metrics
from quartet_reward.errors import ShuttingDown
from quartet_server.fair_queue import Grant, RunQueue

T = TypeVar("T")

CURRENT_RUN: ContextVar[str] = ContextVar("quartet_reward_run", default="")
"""The run whose item the current task scores. Set by the scorer, so that verifiers need not pass it on."""

WAITED: ContextVar[list[float] | None] = ContextVar("quartet_reward_waited", default=None)
"""A list of one number, the seconds that the current task has waited. Set by the scorer."""


def count_wait(seconds: float) -> None:
    """Add to the current task's waiting time, which is excluded from its verification time."""
    if (waited := WAITED.get()) is not None:
        waited[0] += seconds


class FairQueue(RunQueue[T]):
    """A pool of resources that runs take turns at; closed, it raises ShuttingDown."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        """`name` is the label `queue` of the metrics."""
        depth = metrics.QUEUE_DEPTH
        super().__init__(depth.labels(name, "waiting"), depth.labels(name, "running"), ShuttingDown, clock)

    async def acquire(self, run: str | None = None, timeout: float | None = None, count: int = 1) -> Grant[T]:
        """Wait for resources, as the superclass does; `run` is by default that of the current task's item."""
        grant = await super().acquire(CURRENT_RUN.get() if run is None else run, timeout, count)
        count_wait(grant.waited)
        return grant
