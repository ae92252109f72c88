"""Keeps the rollouts asleep while a step is trained, if they share its GPUs."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from quartet.v1 import rollout_pb2

from quartet_common.durations import to_duration
from quartet_common.log import get_logger
from quartet_trainer.config import WeightsSection
from quartet_trainer.weight_sync.rollouts import Rollouts

log = get_logger(__name__)

SLEEP_SECONDS = 30.0  # a sleeping rollout wakes after this time unless SetSleep is called again


class RolloutSleep:
    """The sleep of all live rollouts, if `trainer.weights.sleep_rollouts` is set."""

    def __init__(self, rollouts: Rollouts, settings: WeightsSection):
        self._rollouts, self._settings = rollouts, settings

    @contextmanager
    def during(self) -> Iterator[dict[str, str]]:
        """Keep the rollouts asleep inside the context. No weight update may be under way.

        Meanwhile the caller can use the GPU memory that they share with this process. The next update wakes them, or an
        exception in the context; if this process ends, they wake after `SLEEP_SECONDS`.

        Yields:
            The error of each rollout that is not asleep, by instance id.
        """
        if not self._settings.sleep_rollouts:
            yield {}
            return
        done = threading.Event()
        renewing = threading.Thread(target=self._renew, args=[done], name="renew-sleep", daemon=True)
        awake = self._set(1)
        renewing.start()
        try:
            try:
                yield awake
            finally:
                done.set()
                renewing.join()
                torch.cuda.empty_cache()  # the rollouts need the memory to wake
        except BaseException:
            self._set(0)
            raise

    def _renew(self, done: threading.Event) -> None:
        while not done.wait(SLEEP_SECONDS / 3):
            for name, why in self._set(1).items():
                log.warning("a rollout does not sleep", extra={"rollout": name, "why": why})

    def _set(self, level: int) -> dict[str, str]:
        """Put the live rollouts to sleep for `SLEEP_SECONDS`, or wake them (0); return the errors by instance id."""
        request = rollout_pb2.SetSleepRequest(level=level, timeout=to_duration(SLEEP_SECONDS))
        deadline = time.monotonic() + self._settings.timeout_seconds
        return self._rollouts.call(self._rollouts.live(), lambda stub: stub.SetSleep, request, deadline)
