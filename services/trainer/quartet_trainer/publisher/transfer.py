"""One weight update of one group: Begin at every rollout, packed broadcast, Finish with the checksum at every one."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from quartet.v1 import rollout_pb2, rollout_pb2_grpc

from quartet_common.durations import to_duration
from quartet_common.log import get_logger
from quartet_common.weights import Checksum
from quartet_trainer.publisher.calls import Answers, gather
from quartet_trainer.publisher.group import WeightGroup
from quartet_trainer.publisher.packing import Packer

log = get_logger(__name__)

ABORT_SECONDS = 5.0

PAUSE_MODES = {
    "keep": rollout_pb2.PAUSE_MODE_KEEP,
    "wait": rollout_pb2.PAUSE_MODE_WAIT,
    "abort": rollout_pb2.PAUSE_MODE_ABORT,
}


@dataclass
class Transfer:
    """An update of the members of `group` to `version`."""

    run_id: str
    version: int
    group: WeightGroup
    stubs: Mapping[str, rollout_pb2_grpc.RolloutServiceStub]
    alive: Callable[[str], bool]
    deadline: float
    """Of the whole update, by time.monotonic."""

    def run(
        self,
        manifest: rollout_pb2.WeightManifest,
        packer: Packer,
        weights: Iterator[tuple[str, torch.Tensor]],
        pause_mode: int,
        keep_kv_cache: bool,
    ) -> Answers[rollout_pb2.FinishWeightUpdateResponse]:
        """Carry it out and return what each rollout answered to Finish.

        Raises:
            TransferFailed: not every rollout began, or the broadcast failed; the caller aborts.
        """
        self._begin(manifest, pause_mode, keep_kv_cache)
        checksum = self._send(packer, weights)
        finish = rollout_pb2.FinishWeightUpdateRequest(
            run_id=self.run_id, group_epoch=self.group.epoch, policy_version=self.version, checksum=checksum
        )
        calls = {
            name: self.stubs[name].FinishWeightUpdate.future(finish, timeout=self._left())
            for name in self.group.members
        }
        return gather(calls, self.deadline, self.alive)

    def _begin(self, manifest: rollout_pb2.WeightManifest, pause_mode: int, keep_kv_cache: bool) -> None:
        request = rollout_pb2.BeginWeightUpdateRequest(
            run_id=self.run_id,
            group_epoch=self.group.epoch,
            policy_version=self.version,
            manifest=manifest,
            pause_mode=pause_mode,
            keep_kv_cache=keep_kv_cache,
            timeout=to_duration(self._left()),
        )
        calls = {
            name: self.stubs[name].BeginWeightUpdate.future(request, timeout=self._left())
            for name in self.group.members
        }
        gather(calls, self.deadline, self.alive).raise_if_bad(f"beginning update to version {self.version}")

    def _send(self, packer: Packer, weights: Iterator[tuple[str, torch.Tensor]]) -> int:
        """Broadcast every bucket, the next one packed meanwhile, and return the checksum of them all."""
        checksum = Checksum()
        wait_for_previous: Callable[[float, Callable[[], str]], None] | None = None
        for bucket in packer.pack(weights):
            if wait_for_previous is not None:
                wait_for_previous(self.deadline, self._gone)
            wait_for_previous = self.group.broadcast(bucket)
            checksum.update(memoryview(bucket.numpy()))
        if wait_for_previous is not None:
            wait_for_previous(self.deadline, self._gone)
        return checksum.value()

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

    def _gone(self) -> str:
        return next((name for name in self.group.members if not self.alive(name)), "")

    def _left(self) -> float:
        return max(0.1, self.deadline - time.monotonic())
