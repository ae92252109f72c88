"""Tracks the policy version of each rollout and updates those that lack the current one: read `Publisher._update`.

Every update ends by its deadline, and a failed one does not end the training: a rollout that fails is skipped for a
while, and the others get the weights in a new group.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from quartet.v1 import rollout_pb2

from quartet_common import tracing
from quartet_common.durations import to_duration
from quartet_common.log import get_logger
from quartet_common.weights import plan_buckets
from quartet_trainer.config import WeightsSection
from quartet_trainer.weight_sync.files import Files
from quartet_trainer.weight_sync.rollouts import (
    CLOSE_SECONDS,
    Rollout,
    Rollouts,
    TransferFailed,
    WeightGroup,
    greet,
)
from quartet_trainer.weight_sync.transports import Packer, Transport, Weights, form_group

log = get_logger(__name__)

ABORT_SECONDS = 5.0


@dataclass
class Published:
    """The outcome of an update."""

    version: int
    epoch: int
    rollouts: int
    """How many rollouts have the version now."""
    bytes: int
    """Sent to each rollout."""
    elapsed: float
    """Seconds, retries included."""
    failures: list[str] = field(default_factory=list)
    """A message for each failed attempt."""


class Publisher:
    """Sends the current policy version to the rollouts, one update at a time.

    With `overlap` an update is sent on a thread, from a copy of the weights, which is not overwritten before the update
    that reads it has ended. Call the public methods from one thread only.
    """

    def __init__(
        self,
        run_id: str,
        settings: WeightsSection,
        transport: Transport,
        rollouts: Rollouts,
        specs: Sequence[tuple[str, int, Sequence[int]]],
        lora: rollout_pb2.LoraConfig | None = None,
        on_end: Callable[[], None] = lambda: None,
    ):
        """Prepare the buckets.

        Args:
            transport: that of the settings; used by this publisher only, which closes it.
            specs: name, Dtype and shape of each tensor, as the learner's `weight_specs`.
            lora: the adapter whose tensors `specs` lists; None: `specs` lists the whole model.
            on_end: called on the sending thread when an update has ended; not without `overlap`.
        """
        self._run_id, self._settings, self._transport, self._rollouts = run_id, settings, transport, rollouts
        self._stopping, self._on_end = rollouts.stopping, on_end
        kind = rollout_pb2.WEIGHT_KIND_FULL if lora is None else rollout_pb2.WEIGHT_KIND_LORA
        self._manifest = plan_buckets(kind, specs, settings.bucket_bytes)
        if lora is not None:
            self._manifest.lora.CopyFrom(lora)
        self._bytes = sum(self._manifest.bucket_bytes)
        self._packer = Packer(self._manifest, transport.device, settings.overlap)
        self._copy: list[torch.Tensor] = []
        self._copied = -1
        """The version of `_copy`; -1: none."""
        self._kind = "full" if lora is None else "lora"
        self._group: WeightGroup | None = None
        self._last_epoch = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publish-weights")
        self._under_way: Future[Published | None] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the current group; -1: none."""
        return self._group.epoch if self._group else -1

    @property
    def under_way(self) -> bool:
        """Whether an update has begun whose outcome was not collected."""
        return self._under_way is not None

    @property
    def seconds(self) -> float:
        """The time limit of an update of all live rollouts."""
        return self._seconds(self._bytes, len(self._rollouts.members.rollouts()))

    def begin(self, version: int, weights: Weights) -> None:
        """Start updating the rollouts that lack `version`, if there are any; without `overlap`, wait for the end.

        No update may be under way: call `collect(wait=True)` first.

        Args:
            weights: of `version`; called once for the copy, without `overlap` for each attempt.
        """
        assert self._under_way is None, "an update is under way"
        if not self.behind(version):
            return
        if not self._settings.overlap:
            published = self._publish(version, partial(self._packer.pack, weights))
            self._under_way = Future()
            self._under_way.set_result(published)
            return
        if self._copied != version:
            self._copied = -1
            self._copy, self._copied = list(self._packer.pack(weights)), version
        self._under_way = self._executor.submit(self._publish, version, lambda: self._copy)
        self._under_way.add_done_callback(lambda _: self._on_end())

    def collect(self, wait: bool = False) -> Published | None:
        """Return the outcome of the update under way; None if there is none, or it has not ended and `wait` is false.

        The wait is bounded, because every update has a deadline.
        """
        if self._under_way is None or not (wait or self._under_way.done()):
            return None
        update, self._under_way = self._under_way, None
        return update.result()

    def current(self, version: int) -> int:
        """Return the number of live rollouts that have `version`."""
        return sum(rollout.version == version for rollout in self._rollouts.live().values())

    def behind(self, version: int) -> dict[str, Rollout]:
        """Return the live rollouts that do not have `version`, except those in backoff after a failure."""
        now, live = time.monotonic(), self._rollouts.live()
        for name, rollout in live.items():
            if rollout.version == version and rollout.member.policy_version < 0 and rollout.has_lost_weights():
                log.warning("rollout lost its weights", extra={"rollout": name})
                rollout.version = None
        return {name: one for name, one in live.items() if one.version != version and one.retry_at <= now}

    def _publish(self, version: int, buckets: Callable[[], Iterable[torch.Tensor]]) -> Published | None:
        """Send `version` to every rollout that lacks it, with retries until the deadline. None: no rollout lacks it."""
        began = time.monotonic()
        failures: list[str] = []
        targets = self.behind(version)
        if not targets:
            return None
        seconds = self._seconds(self._bytes, len(targets))
        deadline = began + seconds
        stream = self._packer.beside_training() if self._settings.overlap else contextlib.nullcontext()
        attributes = {"quartet.policy_version": version}
        with stream, tracing.span("publish weights", root=True, attributes=attributes):
            while targets and time.monotonic() < deadline and not self._stopping():
                try:
                    self._update(version, targets, buckets, deadline)
                except TransferFailed as failure:
                    self._drop_group()
                    if self._stopping():
                        break
                    log.warning("weight update failed", extra={"version": version, "error": str(failure)})
                    failures.append(str(failure))
                    self._back_off(failure.blame)
                targets = self.behind(version)
        if targets and not self._stopping():
            failures.append(f"{', '.join(targets)} did not get version {version} in {seconds:.3g} s")
            self._back_off(dict.fromkeys(targets, "not in time"))
        elapsed = time.monotonic() - began
        return Published(version, self.epoch, self.current(version), self._bytes, elapsed, failures)

    def _update(
        self,
        version: int,
        targets: dict[str, Rollout],
        buckets: Callable[[], Iterable[torch.Tensor]],
        deadline: float,
    ) -> None:
        """Update `targets`: Begin, send, Finish. Raises TransferFailed."""
        group, transport = self._group_of(targets), self._transport
        group.deadline = deadline
        update: dict[str, Any] = {"run_id": self._run_id, "group_epoch": group.epoch, "policy_version": version}
        for rollout in targets.values():
            rollout.version = None  # unknown until Finish succeeds
        try:
            path = ""  # of the files, which the rollouts read from Begin on
            if isinstance(transport, Files):
                path = str(transport.write(group, buckets(), version, self._manifest))
            begin = rollout_pb2.BeginWeightUpdateRequest(
                **update,
                manifest=self._manifest,
                pause_mode=f"PAUSE_MODE_{self._settings.pause_mode.upper()}",
                keep_kv_cache=self._settings.keep_kv_cache,
                path=path,
                timeout=to_duration(max(0.1, deadline - time.monotonic())),
            )
            if errors := self._rollouts.call(targets, lambda stub: stub.BeginWeightUpdate, begin, deadline):
                raise TransferFailed(f"beginning update to version {version} failed", errors)
            self._send(group, buckets())
            sums = self._packer.checksums()
            finish = rollout_pb2.FinishWeightUpdateRequest(**update, checksum=sums[-1], bucket_checksums=sums)
            errors = self._rollouts.call(targets, lambda stub: stub.FinishWeightUpdate, finish, deadline)
        except Exception as failure:  # a member that does not answer the abort gives up by its own deadline
            abort = rollout_pb2.AbortWeightUpdateRequest(**update, reason=str(failure))
            self._rollouts.call(targets, lambda stub: stub.AbortWeightUpdate, abort, time.monotonic() + ABORT_SECONDS)
            raise
        for name in targets.keys() - errors.keys():
            targets[name].version, targets[name].failures = version, 0
        if errors:
            raise TransferFailed(f"finishing update to version {version} failed", errors)

    def _send(self, group: WeightGroup, buckets: Iterable[torch.Tensor]) -> None:
        """Call the transport; an error of a package's code is a failed transfer."""
        # Without a copy the tensors are packed meanwhile, and what is no OSError may be an error of the learner.
        of_transport = Exception if self._settings.overlap else OSError
        try:
            self._transport.send(group, buckets)
        except TransferFailed:
            raise
        except of_transport as error:
            name = self._settings.transport
            raise TransferFailed(f"transport '{name}' failed: {type(error).__name__}: {error}") from error

    def _group_of(self, targets: dict[str, Rollout]) -> WeightGroup:
        """Return the group of exactly these rollouts, the current one if it is. Raises TransferFailed."""
        if self._group is not None and self._group.rollouts.keys() == targets.keys():
            self._group.rollouts = targets  # a rollout that left and came back has a new channel
            return self._group
        self._drop_group()
        newest = greet(targets, self._settings.transport, self._kind)
        self._last_epoch = 1 + max(self._last_epoch, self._rollouts.members.epoch, newest)
        ranks = 1 + sum(rollout.ranks for rollout in targets.values())
        seconds = self._seconds(max(self._manifest.bucket_bytes, default=0), len(targets))
        group = WeightGroup(self._run_id, self._last_epoch, ranks, seconds, targets, self._rollouts.alive)
        form_group(self._settings.transport, self._transport, group)
        self._group = group
        return group

    def _seconds(self, size: int, rollouts: int) -> float:
        """Return the timeout for sending `size` bytes to each of `rollouts`."""
        return self._settings.timeout_seconds + size * rollouts / self._settings.least_bandwidth

    def _back_off(self, blame: dict[str, str]) -> None:
        live = self._rollouts.live()
        for name in blame.keys() & live.keys():
            seconds, why = live[name].back_off(), blame[name]
            log.warning("rollout is skipped for a while", extra={"rollout": name, "seconds": seconds, "why": why})

    def _drop_group(self, seconds: float = 0.0) -> None:
        """Leave the group; wait at most `seconds` for operations under way."""
        group, self._group = self._group, None
        if group is not None and group.process_group is not None:
            group.process_group.close(seconds)

    def close(self) -> None:
        """Wait for the update under way, leave the group, and close the transport."""
        self._executor.shutdown(wait=True)
        self._drop_group(CLOSE_SECONDS)
        self._transport.close()
