"""Fetches batches of experience: the next one while the current one is trained.

One thread leases, decodes and filters (invalid groups, dynamic sampling) the batch of the step that the loop asks for.
The broker always returns the same batch for a step, so a batch that was fetched but not trained before the process
ended is fetched again after a restart.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError
from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.log import get_logger
from quartet_common.tensors import decode
from quartet_common.text import Repeats
from quartet_server import metrics
from quartet_trainer.batch import ExperienceError
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import WakeEvent
from quartet_trainer.errors import InvalidGroupsError
from quartet_trainer.session import Batch, BrokerSession

log = get_logger(__name__)

_INVALID = metrics.counter(
    "quartet_trainer_invalid_groups_total", "Groups dropped as invalid, by rollout.", ["rollout"]
)
_IN_A_ROW = metrics.gauge(
    "quartet_trainer_invalid_groups_in_a_row", "Invalid groups of a rollout since its last valid one.", ["rollout"]
)


class InvalidGroups:
    """Finds and drops the invalid groups of batches. For the fetching thread."""

    def __init__(
        self,
        session: BrokerSession,
        check: Callable[[experience_pb2.GroupTensors], None],
        notice: Callable[[str], None],
        alive: Callable[[str], bool],
        most: int,
    ):
        """Take what checks and reports.

        Args:
            check: `Learner.check_group`.
            notice: sends a warning to the run's event stream.
            alive: whether a rollout is a member of the run.
            most: invalid groups in a row, over all rollouts, that end the training; 0: no limit.
        """
        self._session = session
        self._check = check
        self._notice = notice
        self._alive = alive
        self._most = most
        self._repeats = Repeats()
        self._since_valid = 0
        self._in_a_row: dict[str, int] = {}  # by rollout, for the rollouts that have metrics

    def drop(self, step: int, batch: Batch, valid: dict[str, experience_pb2.GroupTensors]) -> bool:
        """Add a batch's tensors to `valid`, by instance id. True: groups were dropped; lease the step again.

        A replayed batch is checked too: if it has an invalid group, it was never trained.

        Raises:
            InvalidGroupsError: the last `most` groups were all invalid.
        """
        dropped = False
        for group in batch.groups:
            name = group.header.instance_id
            if name in valid:  # checked and counted in an earlier call for this step
                continue
            try:
                valid[name] = self._decode(group)
                self._since_valid = 0
            except (DecodeError, ExperienceError) as error:
                dropped = True
                self._drop(step, name, str(error))
        return dropped

    def forget_gone(self) -> None:
        """Remove the metrics of rollouts that have left the run."""
        for rollout in [name for name in self._in_a_row if not self._alive(name)]:
            del self._in_a_row[rollout]
            for metric in (_INVALID, _IN_A_ROW):
                metric.remove_by_labels({"rollout": rollout})

    def _decode(self, group: experience_pb2.ExperienceGroup) -> experience_pb2.GroupTensors:
        tensors = experience_pb2.GroupTensors.FromString(group.tensors)
        self._check(tensors)
        transcript = experience_pb2.GroupTranscript.FromString(group.transcript)
        if any(self._in_a_row.values()):
            rollout = transcript.rollout_id or self._session.rollout_of(group.header.instance_id)
            if self._in_a_row.get(rollout):
                self._in_a_row[rollout] = 0
                _IN_A_ROW.labels(rollout).set(0)
        return tensors

    def _drop(self, step: int, name: str, reason: str) -> None:
        rollout = self._session.rollout_of(name)
        self._session.drop(step, [name], f"invalid group of {rollout}: {reason}")
        _INVALID.labels(rollout).inc()
        self._in_a_row[rollout] = self._in_a_row.get(rollout, 0) + 1
        self._since_valid += 1
        _IN_A_ROW.labels(rollout).set(self._in_a_row[rollout])
        since = self._repeats.count(rollout)
        if since is not None:
            more = f" ({since} more of this rollout since the last such line)" if since else ""
            warning = f"group '{name}' of rollout '{rollout}' cannot be trained and is dropped: {reason}{more}"
            log.warning(warning, extra={"step": step})
            self._notice(warning)
        if 0 < self._most <= self._since_valid:
            raise InvalidGroupsError(
                f"the last {self._since_valid} groups cannot be trained (trainer.max_invalid_groups); the last of "
                f"them, of rollout '{rollout}': {reason}"
            )


REASON = "zero variance"


def without_variance(groups: Mapping[str, experience_pb2.GroupTensors], by_turn: bool) -> list[str]:
    """Return the ids of the groups whose rewards are all equal, those of each seat.

    `by_turn`: whether turns are compared; then a group in which any turn has a reward of its own is left out.
    """

    def equal(group: experience_pb2.GroupTensors) -> bool:
        rewards = decode(group.rewards)
        seats = decode(group.seats) if group.HasField("seats") else np.zeros(rewards.size)
        of_turns = by_turn and np.frombuffer(group.turn_rewards.data, np.float32).any()
        return not of_turns and all(np.ptp(rewards[seats == seat]) == 0 for seat in np.unique(seats))

    return [name for name, group in groups.items() if equal(group)]


def outside_accuracy(groups: Mapping[str, experience_pb2.GroupTensors], bounds: tuple[float, float]) -> list[str]:
    """Return the ids of the groups whose mean accuracy of judged answers is outside the bounds, that of each seat.

    Answers that no verifier judged do not count, nor do seats without a judged one.
    """

    def outside(group: experience_pb2.GroupTensors) -> bool:
        right = decode(group.ans_acc)
        judged = decode(group.ans_judged) > 0 if group.HasField("ans_judged") else np.ones(right.size, dtype=bool)
        seats = (decode(group.seats) if group.HasField("seats") else np.zeros(right.size))[judged]
        means = [right[judged][seats == seat].mean() for seat in np.unique(seats)]
        return bool(means) and not any(bounds[0] <= mean <= bounds[1] for mean in means)

    return [name for name, group in groups.items() if outside(group)]


JOIN_SECONDS = 5.0


@dataclass
class Fetched:
    """A step's batch, ready for training; without groups if the manifest is not granted."""

    step: int
    manifest: broker_pb2.BatchManifest
    groups: list[experience_pb2.ExperienceGroup] = field(default_factory=list)
    """Sorted by instance id, because the order determines mini-batches and rounding, and groups arrive in any order."""
    tensors: list[experience_pb2.GroupTensors] = field(default_factory=list)
    """Decoded, in the order of `groups`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of dynamic sampling."""


class BatchFetcher:
    """Fetches one batch at a time, on a thread, in the order of `ask`."""

    def __init__(
        self,
        session: BrokerSession,
        invalid: InvalidGroups,
        settings: TrainerSection,
        on_arrival: Callable[[], None],
    ):
        """`on_arrival`: called on the fetching thread when `take` will return a batch or raise."""
        self._session = session
        self._invalid = invalid
        self._dynamic = settings.samples_dynamically
        self._by_turn = settings.algorithm.credit != "episode"
        self._most_refills = settings.dynamic_sampling.max_refills
        self._accuracy = settings.dynamic_sampling.accuracy_range
        self._on_arrival = on_arrival
        self._asked = -1
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Fetched | BaseException] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._cancel = WakeEvent()
        self._thread = threading.Thread(target=self._fetch_all, name="fetch-batches", daemon=True)
        self._thread.start()

    def ask(self, step: int) -> None:
        """Start fetching the batch of `step`; asking again does nothing. Ask for steps in order."""
        if step > self._asked:
            self._asked = step
            self._wanted.put(step)

    def take(self, step: int) -> Fetched | None:
        """Return the batch of `step`, which was asked for; None while it is being fetched.

        Raises:
            SessionLost, TrainingError, Stopped: fetching failed with this error.
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
        """Cancel fetching. The broker keeps a batch that it has granted, for the restarted trainer."""
        self._closing.set()
        self._cancel.set()
        self._wanted.put(None)
        self._thread.join(JOIN_SECONDS)

    def _fetch_all(self) -> None:
        while (step := self._wanted.get()) is not None:
            try:
                fetched = self._fetch(step)
            except BaseException as error:  # raised again by `take`
                self._arrived.put(error)
                self._on_arrival()
                return
            if fetched is None:
                return
            self._arrived.put(fetched)
            self._on_arrival()

    def _fetch(self, step: int) -> Fetched | None:
        """Lease until the batch is complete and valid, or the broker says that there is none. None: closing."""
        valid: dict[str, experience_pb2.GroupTensors] = {}
        dropped = refills = 0
        while not self._closing.is_set():
            batch = self._session.lease(step, self._cancel)
            self._invalid.forget_gone()
            if batch is None:
                continue
            manifest = batch.manifest
            if not manifest.granted:
                if manifest.run_finished or manifest.end_of_data:
                    return Fetched(step, manifest)
                continue
            if self._invalid.drop(step, batch, valid):
                continue  # the broker replaces the dropped groups
            groups = sorted(batch.groups, key=lambda group: group.header.instance_id)
            tensors = {group.header.instance_id: valid[group.header.instance_id] for group in groups}
            # A replayed batch may have been trained before the restart, and must stay the same. The last batch of the
            # data cannot be refilled.
            final = manifest.replayed or manifest.end_of_data or refills >= self._most_refills
            if self._dynamic and not final and (count := self._drop_useless(step, tensors)):
                dropped, refills = dropped + count, refills + 1
                log.info("groups dropped by dynamic sampling", extra={"step": step, "groups": count, "refill": refills})
                continue
            cost = {"batch/dropped_groups": float(dropped), "batch/refills": float(refills)} if self._dynamic else {}
            return Fetched(step, manifest, groups, list(tensors.values()), cost)
        return None

    def _drop_useless(self, step: int, groups: Mapping[str, experience_pb2.GroupTensors]) -> int:
        """Have the broker replace the groups that dynamic sampling does not take; return how many they are."""
        flat = without_variance(groups, self._by_turn)
        outside = [] if self._accuracy is None else outside_accuracy(groups, self._accuracy)
        outside = [name for name in outside if name not in flat]
        for names, reason in ((flat, REASON), (outside, "accuracy out of range")):
            if names:
                self._session.drop(step, names, reason)
        return len(flat) + len(outside)
