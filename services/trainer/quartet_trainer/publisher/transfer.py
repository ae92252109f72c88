"""One weight update of one group: Begin at every rollout, the tensors, Finish with the checksum at every one."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from quartet.v1 import rollout_pb2, rollout_pb2_grpc

from quartet_common.durations import to_duration
from quartet_common.log import get_logger
from quartet_trainer.publisher.calls import Answers, TransferFailed, gather
from quartet_trainer.publisher.group import WeightGroup
from quartet_trainer.publisher.packing import Packer, Snapshot, Weights

log = get_logger(__name__)

ABORT_SECONDS = 5.0

PAUSE_MODES = {
    "keep": rollout_pb2.PAUSE_MODE_KEEP,
    "wait": rollout_pb2.PAUSE_MODE_WAIT,
    "abort": rollout_pb2.PAUSE_MODE_ABORT,
}


@dataclass
class Transfer:
    """An update of the members of `group` to `version`; a `Carriage` to the transport."""

    run_id: str
    version: int
    group: WeightGroup
    stubs: Mapping[str, rollout_pb2_grpc.RolloutServiceStub]
    alive: Callable[[str], bool]
    deadline: float
    """Of the whole update, by time.monotonic."""
    packer: Packer
    weights: Weights | Snapshot
    """Packed on the way, called once if the tensors are needed; or packed already."""
    pause_mode: int = rollout_pb2.PAUSE_MODE_KEEP
    keep_kv_cache: bool = False

    @property
    def manifest(self) -> rollout_pb2.WeightManifest:
        """See `Carriage.manifest`."""
        return self.packer.manifest

    @property
    def checksum(self) -> Callable[[], int] | None:
        """See `Carriage.checksum`."""
        return self.weights.checksum if isinstance(self.weights, Snapshot) else None

    def run(self) -> Answers[rollout_pb2.FinishWeightUpdateResponse]:
        """Carry it out and return what each rollout answered to Finish.

        Raises:
            TransferFailed: not every rollout began, or the tensors did not go through; the caller aborts.
        """
        checksum = self.group.channel.carry(self)
        finish = rollout_pb2.FinishWeightUpdateRequest(
            run_id=self.run_id, group_epoch=self.group.epoch, policy_version=self.version, checksum=checksum
        )
        calls = {
            name: self.stubs[name].FinishWeightUpdate.future(finish, timeout=self._left())
            for name in self.group.members
        }
        return gather(calls, self.deadline, self.alive)

    def buckets(self) -> Iterator[torch.Tensor]:
        """See `Carriage.buckets`."""
        if isinstance(self.weights, Snapshot):
            yield from self.weights.buckets
            return
        with contextlib.closing(self.weights()) as tensors:
            yield from self.packer.pack(tensors)

    def begin(self, path: str = "") -> None:
        """See `Carriage.begin`."""
        request = rollout_pb2.BeginWeightUpdateRequest(
            run_id=self.run_id,
            group_epoch=self.group.epoch,
            policy_version=self.version,
            manifest=self.manifest,
            pause_mode=self.pause_mode,
            keep_kv_cache=self.keep_kv_cache,
            path=path,
            timeout=to_duration(self._left()),
        )
        calls = {
            name: self.stubs[name].BeginWeightUpdate.future(request, timeout=self._left())
            for name in self.group.members
        }
        gather(calls, self.deadline, self.alive).raise_if_bad(f"beginning update to version {self.version}")

    def check(self) -> None:
        """See `Carriage.check`."""
        if time.monotonic() > self.deadline:
            raise TransferFailed("the tensors did not go through in time")
        if gone := next((name for name in self.group.members if not self.alive(name)), ""):
            raise TransferFailed("the update was given up", {gone: "is gone"})

    def abort(self, reason: str) -> Answers[rollout_pb2.AbortWeightUpdateResponse]:
        """Tell every member that is alive that the update is given up; return which version stands at each."""
        request = rollout_pb2.AbortWeightUpdateRequest(
            run_id=self.run_id, group_epoch=self.group.epoch, policy_version=self.version, reason=reason
        )
        calls = {
            name: self.stubs[name].AbortWeightUpdate.future(request, timeout=ABORT_SECONDS)
            for name in self.group.members
            if self.alive(name)
        }
        return gather(calls, time.monotonic() + ABORT_SECONDS, self.alive)

    def _left(self) -> float:
        return max(0.1, self.deadline - time.monotonic())
