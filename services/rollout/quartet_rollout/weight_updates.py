"""The weight update as a state machine.

    state      event                                   next       generation
    APART      join                                    JOINING    continues
    JOINING    all ranks met                           JOINED     continues
    JOINING    deadline, error                         APART      continues
    JOINED     begin                                   RECEIVING  continues
    RECEIVING  finish, checksum equal                  RECEIVING  paused for the installation
    RECEIVING  installed                               JOINED     resumed, new version
    RECEIVING  finish, checksum differs                APART      continues, old version
    RECEIVING  transfer failed, deadline, abort, join  APART      continues, old version
    RECEIVING  no pause in time                        APART      resumed, old version
    RECEIVING  installation failed                     APART      stopped: version -1
    any        join of a newer epoch                   JOINING

A transfer fills buffers and changes no parameter: until the installation, tokens are generated with the old weights. If
the engine sleeps, the transfer continues, and its end wakes the engine. One task owns an update from begin to end,
under one deadline, so a trainer that disappears blocks nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quartet.v1 import rollout_pb2

from quartet_common.errors import (
    ContractError,
    aborted,
    data_loss,
    failed_precondition,
    invalid_argument,
    unimplemented,
)
from quartet_common.log import get_logger
from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    Engine,
    EngineError,
    ManifestError,
    PauseMode,
    WeightGroupInfo,
)
from quartet_rollout.groups import Groups
from quartet_rollout.metrics import PAUSE_SECONDS, POLICY_VERSION, WEIGHT_UPDATES
from quartet_rollout.sleep import Sleep
from quartet_rollout.state import RolloutState
from quartet_server.transports import how_to_install

log = get_logger(__name__)

NO_EPOCH = -1
_UNKNOWN = "the weights are of unknown version"

# Added to the rendezvous' own deadline, in case it hangs.
_JOIN_GRACE_SECONDS = 2.0


_PHASES = 3
"""Phases after the transfer, each with the update's deadline: pause, installation, resume."""


@dataclass(eq=False)
class _Update:
    request: rollout_pb2.BeginWeightUpdateRequest
    pause_mode: PauseMode
    seconds: float
    """Deadline of each phase: transfer and finish, pause, installation."""
    began: float
    expected: asyncio.Future[list[int]]
    """The sender's running checksums, of each bucket or only the last; set by finish."""
    transfer: asyncio.Task[None] = field(init=False)
    """Ends when all buckets have arrived with equal checksums. Cancelling it gives the update up; after its end the
    update can only be awaited."""
    outcome: asyncio.Task[float | ContractError] = field(init=False)
    """From begin to end: seconds that generation was paused, or why the old weights stay."""
    given_up: str = ""
    """Why the transfer was cancelled."""
    paused_at: float = 0.0
    """When generation paused, or was asked to."""

    @property
    def version(self) -> int:
        return self.request.policy_version

    def is_for(self, epoch: int, policy_version: int) -> bool:
        return (self.request.group_epoch, self.version) == (epoch, policy_version)


class _Failed(Exception):
    """An update ends without its weights."""

    def __init__(self, outcome: str, error: ContractError):
        """`outcome`: the metric's label."""
        super().__init__(error.message)
        self.outcome, self.error = outcome, error


def _compare(received: list[int], sent: list[int]) -> None:
    """Raise _Failed if checksums differ, naming the first such bucket."""
    for bucket, (came, went) in enumerate(zip(received, sent, strict=True), start=1):
        if came != went:
            where = f"bucket {bucket} of {len(sent)}: " if len(sent) > 1 else ""
            reason = f"{where}received {came:016x}, sent {went:016x}; the old weights stand, join again"
            raise _Failed("checksum_differs", data_loss("checksum", reason))


def _why(error: Exception, late: str = "") -> str:
    """Return an engine error's reason: `late` for a deadline. An engine of another package may raise anything."""
    if isinstance(error, TimeoutError):
        return late
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


class WeightUpdates:
    """The current weight update, at most one, and the weight group it uses."""

    def __init__(self, state: RolloutState, sleep: Sleep, groups: Groups, spawn: Callable[..., asyncio.Task]):
        """`spawn(coroutine, name)` runs a task whose failure stops the service."""
        self._state, self._sleep, self._groups, self._spawn = state, sleep, groups, spawn
        self._lock = asyncio.Lock()
        self._info: WeightGroupInfo | None = None
        """The group that it is in or is joining; None: none."""
        self._apart_because = "it was never invited"
        self._joining: asyncio.Task | None = None
        self._newest_epoch = NO_EPOCH
        self._update: _Update | None = None
        """The last one that was begun in this run; its `outcome` is done when it has ended."""

    @property
    def _engine(self) -> Engine:
        assert self._state.engine is not None  # calls are rejected while it loads
        return self._state.engine

    @property
    def newest_epoch(self) -> int:
        """The newest group epoch this rollout was in, is in or is joining; -1: none."""
        return max(self._newest_epoch, self.epoch)

    @property
    def epoch(self) -> int:
        """The group epoch this rollout is in, or is joining; -1: none."""
        return self._info.epoch if self._info is not None else NO_EPOCH

    async def join(self, info: WeightGroupInfo) -> int:
        """Begin to join a group; return the ranks this rollout takes. Raises ContractError."""
        if f"weights.{info.transport}" not in self._engine.capabilities():
            offered = [name for name in self._engine.capabilities() if name.startswith("weights.")]
            cure = how_to_install(info.transport)
            raise unimplemented("transport", f"this rollout cannot receive by {info.transport}; it has {offered}{cure}")
        ranks = self._engine.weight_ranks
        if info.rank + ranks > info.world_size:
            raise invalid_argument(
                "rank",
                f"{info.rank} of {info.world_size}",
                f"1 to {info.world_size - ranks}: this rollout takes {ranks}",
            )
        newest = self.newest_epoch
        if info.epoch < newest:
            raise failed_precondition("group_epoch", f"epoch {info.epoch} is older than this rollout's, {newest}")
        number = self._state.run_number
        async with self._lock:
            self._require_run(number)
            if info == self._info:
                return ranks
            await self._interrupt(f"group epoch {info.epoch} began")
            await self._leave(f"group epoch {info.epoch} began")
            self._info = info
            self._joining = self._spawn(self._meet(info), f"join weight group {info.epoch}")
        log.info("joining weight group", extra={"epoch": info.epoch, "rank": info.rank, "world_size": info.world_size})
        return ranks

    async def _meet(self, info: WeightGroupInfo) -> None:
        try:
            async with asyncio.timeout(info.timeout_seconds + _JOIN_GRACE_SECONDS):
                await self._engine.join_weight_group(info)
        except Exception as error:
            reason = _why(error, f"not all ranks met within {info.timeout_seconds:g} s")
            log.warning("could not join weight group: %s", reason, extra={"epoch": info.epoch})
            self._apart_because, self._info = f"joining it failed: {reason}", None
            await self._engine.leave_weight_group()
        else:
            # Only now: a group that never forms must not rule out earlier epochs.
            self._newest_epoch = info.epoch
            log.info("joined weight group", extra={"epoch": info.epoch})

    async def begin(self, request: rollout_pb2.BeginWeightUpdateRequest, pause_mode: PauseMode, seconds: float) -> None:
        """Begin to receive an update, with a deadline of `seconds`. Raises ContractError."""
        began = time.monotonic()
        number = self._state.run_number
        if self._joining is not None and self.epoch == request.group_epoch:
            await asyncio.wait({self._joining}, timeout=seconds)
        async with self._lock:
            self._require_run(number)
            update = self._update
            if update is not None and update.transfer.done():
                await asyncio.wait({update.outcome})
            if update is not None and not update.outcome.done():
                if update.is_for(request.group_epoch, request.policy_version):
                    return
                raise failed_precondition("policy_version", f"version {update.version} is being received already")
            self._require_epoch(request.group_epoch)
            if self._state.sleep_level and pause_mode == "wait":
                raise failed_precondition(
                    "pause_mode", "it sleeps, so no completion can end: allowed: keep, abort, or wake it first"
                )
            try:
                self._engine.check_manifest(request.manifest)
            except ManifestError as error:
                raise invalid_argument("manifest", str(error), "tensors that fit this rollout's model") from error
            expected = asyncio.get_running_loop().create_future()
            update = self._update = _Update(request, pause_mode, seconds, began, expected)
            update.transfer = asyncio.create_task(self._transfer(update))
            update.outcome = self._spawn(self._run_update(update), f"weight update {update.version}")
            self._state.updating = True

    def _require_run(self, number: int) -> None:
        """Reject a call that waited while the rollout switched to another run; epochs of two runs may be equal."""
        if number != self._state.run_number:
            raise failed_precondition("run_id", "this rollout works for another run now")

    def _require_epoch(self, epoch: int) -> None:
        if self._info is None:
            where = f"this rollout is in no weight group: {self._apart_because}"
        elif self.epoch != epoch:
            where = f"this rollout is in epoch {self.epoch}"
        elif self._joining is not None and not self._joining.done():
            where = "this rollout is still joining it"
        else:
            return
        raise failed_precondition("group_epoch", f"epoch {epoch}: {where}; join first")

    async def _run_update(self, update: _Update) -> float | ContractError:
        """Run an update from the transfer to the resume. An engine error in `_conclude` stops the service, as does an
        engine that never answers: while generation is paused, `StallWatch` expects no token."""
        try:
            await asyncio.wait({update.transfer})
            async with asyncio.timeout(_PHASES * update.seconds):
                return await self._conclude(update)
        except TimeoutError:
            late = f"the engine did not answer within {_PHASES * update.seconds:g} s of the transfer's end"
            raise EngineError(late) from None
        finally:
            self._state.updating = False

    async def _conclude(self, update: _Update) -> float | ContractError:
        """Install the weights if the transfer succeeded, and resume."""
        arrived = time.monotonic()
        result: float | ContractError
        try:
            await self._install(update)
            outcome = "installed"
        except _Failed as failed:
            result, outcome = failed.error, failed.outcome
            of = {"version": update.version, "epoch": update.request.group_epoch}
            log.warning("weight update failed: %s", result.message, extra=of)
            await self._leave(result.message)
            with contextlib.suppress(EngineError, TimeoutError):  # the sleep's timer tries again
                async with asyncio.timeout(update.seconds):
                    await self._sleep.end()
        if self._state.paused:
            await self._engine.resume()
            paused = time.monotonic() - update.paused_at
            PAUSE_SECONDS.observe(paused)
            self._state.paused = False
            self._version_changed()
            if outcome == "installed":
                result = paused
                times = {"received_ms": round((arrived - update.began) * 1000), "paused_ms": round(paused * 1000)}
                log.info("weights installed", extra={"version": update.version, **times})
        WEIGHT_UPDATES.labels(outcome).inc()
        return result

    async def _transfer(self, update: _Update) -> None:
        """Receive the weights, wait for finish and compare checksums. Raises _Failed."""
        request, left = update.request, update.began + update.seconds - time.monotonic()
        try:
            async with asyncio.timeout(left):
                received = await self._engine.receive_weights(request.manifest, max(left, 0.001), request.path)
                sent = await asyncio.shield(update.expected)  # the deadline must not cancel what finish sets
            _compare(received[-len(sent) :], sent)
        except _Failed:
            raise
        except TimeoutError:
            reason = f"the update was not finished within {update.seconds:g} s"
            raise _Failed("given_up", aborted("weight update", reason)) from None
        except Exception as error:
            raise _Failed("transfer_failed", aborted("transfer", _why(error))) from error

    async def _install(self, update: _Update) -> None:
        """Pause and install. Raises _Failed, also for a failed transfer."""
        if update.transfer.cancelled():
            raise _Failed("given_up", aborted("weight update", update.given_up))
        update.transfer.result()
        self._state.paused, update.paused_at = True, time.monotonic()
        try:
            async with asyncio.timeout(update.seconds):
                await self._engine.pause(update.pause_mode, update.request.keep_kv_cache)
                update.paused_at = time.monotonic()  # with mode "wait" completions have run until now
                await self._sleep.end()  # while paused, so that the old weights generate nothing
        except Exception as error:
            why = _why(error, f"{update.seconds:g} s have passed")
            raise _Failed("given_up", aborted("pause", f"generation did not pause: {why}")) from error
        try:
            async with asyncio.timeout(update.seconds):
                await self._engine.install_weights(update.version)
        except Exception as error:
            await self._engine.set_version(UNKNOWN_VERSION)
            await self._groups.give_back_all(_UNKNOWN)
            reason = _why(error, f"not installed within {update.seconds:g} s")
            failure = data_loss("installation", f"{reason}; the weights are unknown")
            raise _Failed("install_failed", failure) from error

    async def _interrupt(self, reason: str) -> None:
        """Cancel the current update, if any, and wait for its end; one that is being installed is only awaited."""
        if (update := self._update) is not None:
            update.given_up = reason
            update.transfer.cancel()
            await asyncio.wait({update.outcome})

    async def finish(self, request: rollout_pb2.FinishWeightUpdateRequest) -> float:
        """Supply the checksums and wait for the installation; return the seconds that generation was paused. Raises
        ContractError."""
        update, version, epoch = self._update, request.policy_version, request.group_epoch
        if update is None or not update.is_for(epoch, version):
            raise failed_precondition("policy_version", f"no update to version {version} was begun in epoch {epoch}")
        buckets = len(update.request.manifest.bucket_bytes)
        if len(request.bucket_checksums) not in (0, buckets):  # earlier trainers send only the last
            raise invalid_argument("bucket_checksums", len(request.bucket_checksums), f"none, or all {buckets}")
        checksums = [*request.bucket_checksums[:-1], request.checksum]
        if not update.expected.done():
            update.expected.set_result(checksums)
        elif update.expected.result() != checksums:
            raise failed_precondition("checksum", "this update was finished before with another checksum")
        outcome = await asyncio.shield(update.outcome)
        if isinstance(outcome, ContractError):
            raise outcome
        return outcome

    async def abort(self, epoch: int, policy_version: int, reason: str) -> int:
        """Give up an update that has not been installed; return the current policy version, -1 if unknown."""
        number = self._state.run_number
        async with self._lock:
            self._require_run(number)
            if (update := self._update) is not None and update.is_for(epoch, policy_version):
                await self._interrupt(f"the trainer gave it up: {reason or 'no reason given'}")
        return self._state.policy_version

    async def forget(self, reason: str) -> None:
        """Give up the current update, leave the group, and reset epochs and version, when the rollout leaves a run."""
        async with self._lock:
            await self._interrupt(reason)
            await self._leave(reason)
            self._newest_epoch, self._update = NO_EPOCH, None
            await self._engine.set_version(UNKNOWN_VERSION)
            await self._groups.give_back_all(_UNKNOWN)
            self._version_changed()

    async def close(self) -> None:
        """Give up the current update and leave the group, at the end of the service."""
        async with self._lock:
            await self._interrupt("the rollout stops")
            await self._leave("the rollout stops")

    async def _leave(self, reason: str) -> None:
        if self._info is None and self._joining is None:
            return
        self._apart_because, self._info = reason, None  # first, because the caller may be cancelled while it waits
        if self._joining is not None and not self._joining.done():
            self._joining.cancel()
            await asyncio.wait({self._joining})
        self._joining = None
        await self._engine.leave_weight_group()

    def _version_changed(self) -> None:
        POLICY_VERSION.set(self._engine.policy_version)
        self._state.changes.notify()
