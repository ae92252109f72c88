"""Batches of experience, the next one fetched while the present one is trained.

One thread leases, decodes and filters (invalid groups, dynamic sampling); the loop says which step it wants next, and
takes it when it is there. The broker gives a step the same batch however often it is asked, so a batch that was fetched
and never trained, because the process ended, is fetched again after a restart.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from quartet.v1 import broker_pb2, experience_pb2

from quartet_trainer.control import WakeEvent
from quartet_trainer.dynamic_sampling import DynamicSampling
from quartet_trainer.invalid_groups import InvalidGroups
from quartet_trainer.session import BrokerSession

JOIN_SECONDS = 5.0


@dataclass
class Fetched:
    """A step's batch, ready to be trained, or the manifest that says why there is none."""

    step: int
    manifest: broker_pb2.BatchManifest
    groups: list[experience_pb2.ExperienceGroup] = field(default_factory=list)
    """By instance id: rollouts finish in any order, and the order decides what a mini-batch is and how sums round."""
    tensors: list[experience_pb2.GroupTensors] = field(default_factory=list)
    """Decoded, in the order of `groups`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What dynamic sampling took."""


class BatchFetcher:
    """Fetches one batch at a time, in the order in which they are asked for."""

    def __init__(
        self,
        session: BrokerSession,
        invalid: InvalidGroups,
        sampling: DynamicSampling,
        on_arrival: Callable[[], None],
    ):
        """`on_arrival`: called, in the fetching thread, whenever `take` has something new to say."""
        self._session = session
        self._invalid = invalid
        self._sampling = sampling
        self._on_arrival = on_arrival
        self._asked = -1
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Fetched | BaseException] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._cancel = WakeEvent()
        self._thread = threading.Thread(target=self._fetch_all, name="fetch-batches", daemon=True)
        self._thread.start()

    def ask(self, step: int) -> None:
        """Have the batch of `step` fetched; asking again does nothing. Steps are asked for in order."""
        if step > self._asked:
            self._asked = step
            self._wanted.put(step)

    def take(self, step: int) -> Fetched | None:
        """Return what came of `step`, which was asked for; None while nothing did.

        Raises:
            SessionLost, TrainingError, Stopped: what the fetching ended with.
        """
        try:
            arrived = self._arrived.get_nowait()
        except queue.Empty:
            return None
        if isinstance(arrived, BaseException):
            raise arrived
        assert arrived.step == step, f"step {step} was to be trained, the batch of {arrived.step} is here"
        return arrived

    def close(self) -> None:
        """Give up what is being fetched. Its batch, if granted, waits at the broker for the restarted trainer."""
        self._closing.set()
        self._cancel.set()
        self._wanted.put(None)
        self._thread.join(JOIN_SECONDS)

    def _fetch_all(self) -> None:
        while (step := self._wanted.get()) is not None:
            try:
                fetched = self._fetch(step)
            except BaseException as error:  # raised again where it can be dealt with
                self._arrived.put(error)
                self._on_arrival()
                return
            if fetched is None:
                return
            self._arrived.put(fetched)
            self._on_arrival()

    def _fetch(self, step: int) -> Fetched | None:
        """Ask until the broker has decided; None: closing."""
        while not self._closing.is_set():
            batch = self._session.lease(step, self._cancel)
            self._invalid.forget_gone()
            if batch is None:
                continue
            if batch.manifest.granted:
                tensors = self._invalid.drop(step, batch)
                if tensors is None or self._sampling.filter(step, batch, tensors):
                    continue  # others will take the place of those that were dropped
                groups = sorted(batch.groups, key=lambda group: group.header.instance_id)
                ordered = [tensors[group.header.instance_id] for group in groups]
                return Fetched(step, batch.manifest, groups, ordered, self._sampling.metrics())
            if batch.manifest.run_finished or batch.manifest.end_of_data:
                return Fetched(step, batch.manifest)
        return None
