"""Forms a weight group, the trainer as rank 0 and some rollouts, for one epoch, and runs updates in it.

A group is never repaired: when a member fails, the publisher drops the group and forms one with a higher epoch. An
update is Begin at every rollout, the tensors, and Finish with the checksums at every rollout.
"""

import concurrent.futures
import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch
from quartet.v1 import rollout_pb2, rollout_pb2_grpc

from quartet_common.durations import to_duration
from quartet_common.errors import describe
from quartet_common.log import get_logger
from quartet_trainer.config import WeightsSection
from quartet_trainer.weight_sync.packing import Packer, Snapshot, Weights
from quartet_trainer.weight_sync.process_group import JOIN_SECONDS, GroupTransport, WeightStore
from quartet_trainer.weight_sync.transports import Channel, Files, TransferFailed, Transport, load_transport
from quartet_weights.process_group import first_line

log = get_logger(__name__)

# How often liveness and the deadline are checked while waiting.
POLL_SECONDS = 0.2
ABORT_SECONDS = 5.0

_CODES = {
    "gloo": rollout_pb2.WEIGHT_TRANSPORT_GLOO,
    "nccl": rollout_pb2.WEIGHT_TRANSPORT_NCCL,
    "file": rollout_pb2.WEIGHT_TRANSPORT_FILE,
}

PAUSE_MODES = {
    "keep": rollout_pb2.PAUSE_MODE_KEEP,
    "wait": rollout_pb2.PAUSE_MODE_WAIT,
    "abort": rollout_pb2.PAUSE_MODE_ABORT,
}


@dataclass
class Answers:
    """The responses of the rollouts that answered, and the errors of the others, by instance id."""

    good: dict[str, Any] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)

    def raise_if_bad(self, what: str) -> None:
        """Raise TransferFailed with the errors if a rollout failed."""
        if self.bad:
            raise TransferFailed(f"{what} failed", self.bad)


def gather(calls: Mapping[str, grpc.Future], deadline: float, alive: Callable[[str], bool]) -> Answers:
    """Wait for all answers, until `deadline` (time.monotonic). A call to a rollout that is not `alive` is cancelled."""
    answers = Answers()
    finished: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name, call in calls.items():
        call.add_done_callback(partial(_put, finished, name))
    waiting = set(calls)
    while waiting:
        try:
            name = finished.get(timeout=POLL_SECONDS)
        except queue.Empty:
            late = time.monotonic() > deadline
            for name in [name for name in waiting if late or not alive(name)]:
                calls[name].cancel()
                waiting.discard(name)
                answers.bad[name] = "did not answer in time" if late else "is gone"
            continue
        if name not in waiting:
            continue
        waiting.discard(name)
        error = calls[name].exception()
        if error is None:
            answers.good[name] = calls[name].result()
        else:
            answers.bad[name] = describe(error)
    return answers


def _put(finished: queue.SimpleQueue[str], name: str, _call: grpc.Future) -> None:
    finished.put(name)


def create_transport(settings: WeightsSection, store: WeightStore, folder: Path) -> Transport:
    """Return the configured transport.

    Args:
        folder: for the file transport's versions; it removes old ones there.

    Raises:
        ConfigError: the transport cannot work here.
    """
    if settings.transport in ("gloo", "nccl"):
        return GroupTransport(settings.transport, store, settings.interface)
    if settings.transport == "file":
        return Files(folder)
    return load_transport(settings.transport, settings.transport_parameters, store.host, folder)


@dataclass(frozen=True)
class WeightGroup:
    """One epoch's group: some rollouts, and the channel to them."""

    run_id: str
    epoch: int
    stubs: Mapping[str, rollout_pb2_grpc.RolloutServiceStub]
    """Of its members, by instance id."""
    channel: Channel
    alive: Callable[[str], bool]
    transport: str
    """Name of the transport."""

    def call(
        self, start: Callable[[rollout_pb2_grpc.RolloutServiceStub, float], grpc.Future], deadline: float
    ) -> Answers:
        """`start` a call of some seconds at every member; wait for the answers until `deadline` (time.monotonic)."""
        seconds = max(0.1, deadline - time.monotonic())
        calls = {name: start(stub, seconds) for name, stub in self.stubs.items()}
        return gather(calls, deadline, self.alive)


def form_group(
    name: str,
    transport: Transport,
    store: WeightStore,
    run_id: str,
    epoch: int,
    stubs: Mapping[str, rollout_pb2_grpc.RolloutServiceStub],
    ranks: dict[str, int],
    timeout: float,
    alive: Callable[[str], bool],
) -> WeightGroup:
    """Form the group of an epoch: all rollouts join in parallel while this process joins as rank 0.

    Args:
        name: of the transport.
        stubs: of the members, by instance id.
        ranks: number of ranks of each rollout (its tensor-parallel size), 1 where missing; updated from the answers.
        timeout: deadline of each operation in the group, in seconds.

    Raises:
        TransferFailed: a rollout did not join, or has another number of ranks than `ranks` says.
    """
    try:
        invitation = transport.invite(epoch)
    except Exception as raised:  # a package's code may raise anything
        raise TransferFailed(f"transport '{name}' failed: {type(raised).__name__}: {raised}") from raised
    request = rollout_pb2.JoinWeightGroupRequest(
        run_id=run_id,
        group_epoch=epoch,
        transport=_CODES.get(name, rollout_pb2.WEIGHT_TRANSPORT_CUSTOM),
        store_host=store.host,
        store_port=store.port,
        world_size=1 + sum(ranks.get(name, 1) for name in stubs),
        timeout=to_duration(timeout),
        libraries=transport.libraries,
        secret=secrets.token_bytes(16),
        transport_name="" if name in _CODES else name,
        invitation=invitation,
    )
    deadline = time.monotonic() + JOIN_SECONDS
    meeting = _meet(name, transport, request, timeout)
    calls, request.rank = {}, 1
    for rollout, stub in stubs.items():  # each call serializes the request as it is then
        calls[rollout] = stub.JoinWeightGroup.future(request, timeout=JOIN_SECONDS)
        request.rank += ranks.get(rollout, 1)
    answers = gather(calls, deadline, alive)
    answers.raise_if_bad(f"joining weight group {epoch}")
    wrong = {one: answer.ranks for one, answer in answers.good.items() if max(1, answer.ranks) != ranks.get(one, 1)}
    if wrong:
        ranks.update(wrong)
        raise TransferFailed(f"weight group {epoch}: rollouts have another number of ranks than assumed: {wrong}")
    while not concurrent.futures.wait([meeting], POLL_SECONDS).done:
        gone = [rollout for rollout in stubs if not alive(rollout)]
        if gone or time.monotonic() > deadline:
            raise TransferFailed(f"weight group {epoch} did not come about", dict.fromkeys(gone, "is gone"))
    if (error := meeting.exception()) is not None:
        raise TransferFailed(f"weight group {epoch} did not come about: {first_line(error, request.secret)}")
    log.info("weight group made", extra={"epoch": epoch, "ranks": request.world_size, "transport": name})
    return WeightGroup(run_id, epoch, dict(stubs), meeting.result(), alive, name)


def _meet(
    name: str, transport: Transport, request: rollout_pb2.JoinWeightGroupRequest, timeout: float
) -> "concurrent.futures.Future[Channel]":
    """Meet the ranks that `request` invites, on a thread. The caller may abandon it, and the channel with it."""
    meeting: concurrent.futures.Future[Channel] = concurrent.futures.Future()
    epoch, secret, world_size = request.group_epoch, request.secret, request.world_size

    def meet() -> None:
        try:
            meeting.set_result(transport.meet(epoch, secret, world_size, timeout))
        except RuntimeError as error:
            meeting.set_exception(error)
        except Exception as error:
            meeting.set_exception(RuntimeError(f"transport '{name}' failed: {type(error).__name__}: {error}"))

    threading.Thread(target=meet, name=f"weight-group-{epoch}", daemon=True).start()
    return meeting


@dataclass
class Transfer:
    """An update of the members of `group` to `version`. It implements `WeightUpdate`."""

    group: WeightGroup
    version: int
    deadline: float
    """Of the whole update, by time.monotonic."""
    packer: Packer
    weights: Weights | Snapshot
    """A function that returns the tensors, which are packed while they are sent, or a packed snapshot."""
    pause_mode: int = rollout_pb2.PAUSE_MODE_KEEP
    keep_kv_cache: bool = False

    @property
    def manifest(self) -> rollout_pb2.WeightManifest:
        return self.packer.manifest

    @property
    def _update(self) -> dict[str, Any]:
        """Fields that all requests of the update share."""
        return {"run_id": self.group.run_id, "group_epoch": self.group.epoch, "policy_version": self.version}

    def run(self) -> Answers:
        """Run the update and return the answers to Finish.

        Raises:
            TransferFailed: Begin failed at a rollout, or the tensors were not sent; the caller must `abort`.
        """
        try:
            self.group.channel.transfer(self)
        except OSError as error:  # from a package's transport
            name = self.group.transport
            raise TransferFailed(f"transport '{name}' failed: {type(error).__name__}: {error}") from error
        sums = (self.weights if isinstance(self.weights, Snapshot) else self.packer).checksums()
        finish = rollout_pb2.FinishWeightUpdateRequest(**self._update, checksum=sums[-1], bucket_checksums=sums)
        return self.group.call(lambda stub, s: stub.FinishWeightUpdate.future(finish, timeout=s), self.deadline)

    def buckets(self) -> Iterator[torch.Tensor]:
        if isinstance(self.weights, Snapshot):
            yield from self.weights.buckets
            return
        with contextlib.closing(self.weights()) as tensors:
            yield from self.packer.pack(tensors)

    def begin(self, path: str = "") -> None:
        request = rollout_pb2.BeginWeightUpdateRequest(
            **self._update,
            manifest=self.manifest,
            pause_mode=self.pause_mode,
            keep_kv_cache=self.keep_kv_cache,
            path=path,
            timeout=to_duration(max(0.1, self.deadline - time.monotonic())),
        )
        answers = self.group.call(lambda stub, s: stub.BeginWeightUpdate.future(request, timeout=s), self.deadline)
        answers.raise_if_bad(f"beginning update to version {self.version}")

    def check(self) -> None:
        if time.monotonic() > self.deadline:
            raise TransferFailed("the tensors did not go through in time")
        if gone := next((name for name in self.group.stubs if not self.group.alive(name)), ""):
            raise TransferFailed("the update was given up", {gone: "is gone"})

    def abort(self, reason: str) -> None:
        """Abort the update at every member. A member that does not answer aborts by its own deadline."""
        request = rollout_pb2.AbortWeightUpdateRequest(**self._update, reason=reason)
        deadline = time.monotonic() + ABORT_SECONDS
        self.group.call(lambda stub, s: stub.AbortWeightUpdate.future(request, timeout=s), deadline)
