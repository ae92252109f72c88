"""Sends new weights to the rollouts during training: from a snapshot, on a thread.

At most one update runs at a time. A snapshot holds one version and is not overwritten until the update that reads it
has ended. Its memory is reused, because allocating fresh pages costs more than the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from quartet_common import tracing
from quartet_common.log import get_logger
from quartet_trainer.weight_sync import Published, Publisher
from quartet_trainer.weight_sync.packing import Snapshot, Weights
from quartet_trainer.weight_sync.publisher import SLEEP_SECONDS

if TYPE_CHECKING:
    from quartet_trainer.learner.learner import Learner  # imports ColossalAI, which is patched first

log = get_logger(__name__)


class WeightSync:
    """Runs the publisher's updates, one at a time. Call its methods from the loop's thread only."""

    def __init__(
        self,
        publisher: Publisher,
        learner: Learner,
        overlap: bool,
        sleep: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ):
        """Take over `publisher`.

        Args:
            overlap: send from a snapshot, on a thread; otherwise `begin` blocks until the update has ended.
            sleep: see `rollouts_asleep`.
            on_end: called on the sending thread when an update has ended.
        """
        self._publisher = publisher
        self._learner = learner
        self._overlap = overlap
        self._sleep = sleep
        self._on_end = on_end
        self._snapshot = publisher.snapshot()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publish-weights")
        self._update: Future[Published | None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether an update has begun whose outcome was not collected."""
        return self._update is not None

    @property
    def seconds(self) -> float:
        return self._publisher.seconds

    @property
    def epoch(self) -> int:
        return self._publisher.epoch

    def begin(self) -> None:
        """Start updating the rollouts that lack the learner's version, if there are any.

        No update may be under way: call `collect(wait=True)` first.
        """
        assert self._update is None, "an update is under way"
        version = self._learner.step
        if not self._publisher.behind(version):
            return
        if not self._overlap:
            self._update = Future()
            self._update.set_result(self._send(version, self._learner.weights))
            return
        if self._snapshot.version != version:
            self._snapshot.take(version, self._learner.weights())
        self._update = self._executor.submit(self._send_beside_training, version)
        self._update.add_done_callback(lambda _: self._on_end())

    def _send_beside_training(self, version: int) -> Published | None:
        with self._snapshot.beside_training():
            return self._send(version, self._snapshot)

    def _send(self, version: int, weights: Weights | Snapshot) -> Published | None:
        with tracing.span("publish weights", root=True, attributes={"quartet.policy_version": version}):
            return self._publisher.publish(version, weights)

    def collect(self, wait: bool = False) -> Published | None:
        """Return the outcome of the update under way; None if there is none, or it has not ended and `wait` is false.

        The wait is bounded: the publisher sets a deadline for every update.
        """
        if self._update is None or not (wait or self._update.done()):
            return None
        update, self._update = self._update, None
        return update.result()

    @contextmanager
    def rollouts_asleep(self) -> Iterator[dict[str, str]]:
        """Keep the rollouts asleep inside the context, if `sleep` is set. No update may be under way.

        Meanwhile the caller can use the GPU memory that they share with this process. The next update wakes them, or an
        exception in the context; if this process ends, they wake after `SLEEP_SECONDS`.

        Yields:
            The error of each rollout that is not asleep, by instance id.
        """
        if not self._sleep:
            yield {}
            return
        assert self._update is None, "an update is under way"
        done = threading.Event()
        renewing = threading.Thread(target=self._renew_sleep, args=[done], name="renew-sleep", daemon=True)
        awake = self._publisher.set_sleep(1)
        renewing.start()
        try:
            try:
                yield awake
            finally:
                done.set()
                renewing.join()
                torch.cuda.empty_cache()  # the rollouts need the memory to wake
        except BaseException:
            self._publisher.set_sleep(0)
            raise

    def _renew_sleep(self, done: threading.Event) -> None:
        while not done.wait(SLEEP_SECONDS / 3):
            for name, why in self._publisher.set_sleep(1).items():
                log.warning("a rollout does not sleep", extra={"rollout": name, "why": why})

    def current(self) -> int:
        """Return how many live rollouts have the learner's version. No update may be under way."""
        return self._publisher.current(self._learner.step)

    def close(self) -> None:
        """Wait for the update under way, then leave the group."""
        self._executor.shutdown(wait=True)
        self._publisher.close()
