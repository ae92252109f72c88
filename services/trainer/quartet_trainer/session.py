"""The trainer's session with the broker: batches in, steps and checkpoints reported. Blocking.

The loop's thread calls all of it but `lease`, which the fetching thread calls.

A broker that is away is waited for and called again; every call here may be repeated. A session that was fenced,
because another trainer opened the run, ends the training with `SessionLost`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, experience_pb2

from quartet_common.diagnosis import Peer
from quartet_common.durations import to_duration
from quartet_common.errors import AWAY, describe, retry_delay
from quartet_common.handshake import handshake
from quartet_common.log import get_logger
from quartet_common.outage import Outage
from quartet_trainer.control import Control, Stopped, WakeEvent
from quartet_trainer.errors import SessionLost, TrainingError
from quartet_trainer.status import Status

log = get_logger(__name__)

CALL_SECONDS = 20.0
LEASE_WAIT_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 5.0
RUN_POLL_SECONDS = 0.5
MAX_GROUPS_PER_MESSAGE = 256
_MOST_DEAD = 1000

# ABORTED: the broker asks to be asked again. RESOURCE_EXHAUSTED: a limit is reached, and it says when.
_LATER = frozenset({grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED})

Answer = TypeVar("Answer")


@dataclass
class Batch:
    """A step's batch, or why there is none."""

    manifest: broker_pb2.BatchManifest
    groups: list[experience_pb2.ExperienceGroup] = field(default_factory=list)


class BrokerSession:
    """A run's session; `open` it first."""

    def __init__(
        self,
        channel: grpc.Channel,
        peer: Peer,
        run_id: str,
        holder: str,
        control: Control,
        status: Status,
        patience: float,
    ):
        """`patience`: seconds for which a broker that went away is waited for."""
        self._channel = channel
        self._stub = broker_pb2_grpc.BrokerServiceStub(channel)
        self._peer = peer
        self._run_id = run_id
        self._holder = holder
        self._control = control
        self._status = status
        self._patience = patience
        self.epoch = -1

    @property
    def stub(self) -> broker_pb2_grpc.BrokerServiceStub:
        """For calls outside the session."""
        return self._stub

    def wait_for_run(self, while_waiting: Callable[[], None]) -> broker_pb2.Run:
        """Wait, as long as it takes, for the broker and for the run to be created; `while_waiting` is called meanwhile.

        Raises:
            Stopped: asked to stop meanwhile.
            TrainingError: the broker cannot work with this trainer.
        """
        handshake_done, outage = False, Outage()
        while True:
            try:
                if not handshake_done:
                    handshake(self._channel, common_pb2.SERVICE_KIND_TRAINER, timeout=5.0)
                    handshake_done = True
                run = self._stub.GetRun(broker_pb2.GetRunRequest(run_id=self._run_id), timeout=CALL_SECONDS).run
                self._status.wait_for("")
                return run
            except grpc.RpcError as error:
                if error.code() in AWAY | _LATER:
                    self._status.wait_for(str(self._peer))
                    if outage.to_be_logged():
                        log.warning("waiting for the broker: %s", self._peer.explain(error))
                elif error.code() == grpc.StatusCode.NOT_FOUND:
                    self._status.wait_for(f"run '{self._run_id}' to be created")
                else:
                    raise TrainingError(f"{self._peer}: {describe(error)}") from error
            while_waiting()
            self._control.wait(RUN_POLL_SECONDS)

    def open(self, checkpoint_step: int, first_remembered_pass: int) -> broker_pb2.OpenSessionResponse:
        """Become the run's trainer, from a checkpoint of `checkpoint_step` steps; `settle` what the answer asks for."""
        request = broker_pb2.OpenSessionRequest(
            run_id=self._run_id,
            holder=self._holder,
            checkpoint_step=checkpoint_step,
            settles_ledger=True,
            first_remembered_pass=first_remembered_pass,
        )
        answer = self._call("OpenSession", request)
        self.epoch = answer.session_epoch
        return answer

    def settle(self, lines: Sequence[tuple[int, Sequence[str]]]) -> int:
        """Send (step, instance ids) of the next steps that the broker's books lack. Returns how many were elsewhere."""
        if self._control.stopping.is_set():
            raise Stopped
        steps = [broker_pb2.TrainedStep(step=step, instance_ids=instance_ids) for step, instance_ids in lines]
        request = broker_pb2.SettleTrainedRequest(run_id=self._run_id, session_epoch=self.epoch, steps=steps)
        return self._call("SettleTrained", request).settled

    def lease(self, step: int, cancelled: WakeEvent) -> Batch | None:
        """Wait a few seconds for the batch of `step`. None when called away by `cancelled`, in any thread."""
        request = broker_pb2.LeaseExperienceRequest(
            run_id=self._run_id,
            session_epoch=self.epoch,
            step=step,
            wait=to_duration(LEASE_WAIT_SECONDS),
            max_groups_per_message=MAX_GROUPS_PER_MESSAGE,
        )
        return self._insist(f"LeaseExperience of step {step}", lambda: self._lease_once(request, cancelled))

    def _lease_once(self, request: broker_pb2.LeaseExperienceRequest, cancelled: WakeEvent) -> Batch | None:
        call = self._stub.LeaseExperience(request, timeout=LEASE_WAIT_SECONDS + CALL_SECONDS)
        batch: Batch | None = None
        with cancelled.may_cancel(call):
            try:
                for part in call:
                    if part.WhichOneof("part") == "manifest":
                        batch = Batch(part.manifest)
                    elif batch is not None:
                        # A broker that does not know of `groups` sends them one by one.
                        batch.groups += part.groups.groups or [part.group]
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.CANCELLED and cancelled.wait(0):
                    return None
                raise
        if batch is None:
            raise TrainingError(f"{self._peer}: LeaseExperience of step {request.step} gave no manifest")
        if batch.manifest.granted and len(batch.groups) != len(batch.manifest.instance_ids):
            raise TrainingError(
                f"{self._peer}: the batch of step {request.step} has {len(batch.groups)} groups, "
                f"its manifest {len(batch.manifest.instance_ids)}"
            )
        return batch

    def rollout_of(self, instance_id: str) -> str:
        """Return the rollout that put a group, "unknown" if the broker has no record of it."""
        request = broker_pb2.GetGroupRequest(run_id=self._run_id, instance_id=instance_id)
        group = self._call("GetGroup", request)
        put = [moment.who for moment in group.moments if moment.kind == broker_pb2.GROUP_MOMENT_KIND_PUT]
        return (put and put[-1]) or "unknown"

    def drop(self, step: int, instance_ids: Sequence[str], reason: str) -> int:
        """Take groups out of a step's batch for good. Returns how many were."""
        request = broker_pb2.DropExperienceRequest(
            run_id=self._run_id, session_epoch=self.epoch, step=step, instance_ids=instance_ids, reason=reason
        )
        return self._call("DropExperience", request).dropped

    def mark_trained(self, step: int, instance_ids: Sequence[str]) -> int:
        """Say that the step's batch, these instances, is in the weights. Returns the new policy version."""
        request = broker_pb2.MarkTrainedRequest(
            run_id=self._run_id, session_epoch=self.epoch, step=step, instance_ids=instance_ids
        )
        return self._call("MarkTrained", request, f" of step {step}").policy_version

    def commit(self, step: int) -> broker_pb2.CommitResponse:
        """Say that steps below `step` are durable."""
        request = broker_pb2.CommitRequest(run_id=self._run_id, session_epoch=self.epoch, step=step)
        return self._call("Commit", request, f" of {step} steps", last=True)

    def finish(self, state: broker_pb2.RunState, reason: str, ending: broker_pb2.RunEnding, step: int) -> None:
        """End the run, all `step` steps of which are committed."""
        request = broker_pb2.FinishRunRequest(
            run_id=self._run_id, state=state, reason=reason, ending=ending, committed_step=step
        )
        self._call("FinishRun", request, last=True)

    def run(self) -> broker_pb2.Run:
        """Return the run as it stands."""
        request = broker_pb2.GetRunRequest(run_id=self._run_id)
        return self._call("GetRun", request, last=True).run

    def dead(self) -> Sequence[broker_pb2.DeadPrompt]:
        """Return the first prompts that were set aside, at most 1,000; none if the broker refuses to say."""
        request = broker_pb2.ListDeadRequest(run_id=self._run_id, limit=_MOST_DEAD)
        try:
            return self._call("ListDead", request, last=True).dead
        except TrainingError as error:
            log.warning("the dead prompts are not known: %s", error)
            return []

    def start_evaluation(self, name: str, version: int) -> broker_pb2.StartEvaluationResponse | None:
        """Queue a set for evaluation at a policy version; None while no prompts of the set are there."""
        request = broker_pb2.StartEvaluationRequest(run_id=self._run_id, evaluation_set=name, policy_version=version)

        def call() -> broker_pb2.StartEvaluationResponse | None:
            try:
                return self._stub.StartEvaluation(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    return None
                raise

        return self._insist(f"StartEvaluation of '{name}'", call)

    def wait_for_evaluation(self, evaluation_id: str, wait: float) -> broker_pb2.GetEvaluationResponse | None:
        """Wait until an evaluation is complete. None when the loop's `WakeEvent` is set."""
        request = broker_pb2.GetEvaluationRequest(
            run_id=self._run_id, evaluation_id=evaluation_id, wait=to_duration(wait), summary_only=True
        )

        def call() -> broker_pb2.GetEvaluationResponse | None:
            answer = self._stub.GetEvaluation.future(request, timeout=wait + CALL_SECONDS)
            try:
                with self._control.wake.may_cancel(answer):
                    return answer.result()
            except grpc.FutureCancelledError:
                return None

        return self._insist("GetEvaluation", call)

    def evaluation_results(self, evaluation_id: str) -> broker_pb2.GetEvaluationResponse:
        """Return an evaluation with its transcripts, as it stands."""
        request = broker_pb2.GetEvaluationRequest(run_id=self._run_id, evaluation_id=evaluation_id)
        return self._call("GetEvaluation", request)

    def _call(self, method: str, request: Message, of: str = "", last: bool = False) -> Any:
        """`_insist` on a unary call; `of`: for errors and logs."""
        return self._insist(method + of, partial(getattr(self._stub, method), request, timeout=CALL_SECONDS), last)

    def _insist(self, what: str, call: Callable[[], Answer], last: bool = False) -> Answer:
        """Call, and call again while the broker is away.

        `last`: go on for a moment even when asked to stop, because what is reported is done already.

        Raises:
            Stopped: asked to stop while the broker is away.
            SessionLost: refused for good.
            TrainingError: the broker stayed away, or answers nonsense.
        """
        began, outage = time.monotonic(), Outage(self._patience, first=0.2, longest=LONGEST_PAUSE_SECONDS)
        while True:
            try:
                answer = call()
                if outage.over():
                    log.info("the broker is back", extra={"call": what})
                    self._status.wait_for("")
                return answer
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise SessionLost(f"the broker refuses {what}: {describe(error)}") from error
                if error.code() not in AWAY | _LATER:
                    raise TrainingError(f"{self._peer}: {what}: {describe(error)}") from error
                pause = outage.failed(retry_delay(error), answered=error.code() in _LATER)
                if outage.given_up:
                    raise TrainingError(
                        f"{what}: {self._peer.explain(error)}; away for {outage.seconds:.0f} s "
                        f"(trainer.broker_timeout_seconds is {self._patience:g})"
                    ) from error
                self._status.wait_for(str(self._peer))
                if outage.to_be_logged():
                    log.warning("calling again: %s", self._peer.explain(error), extra={"call": what})
                pause = min(pause, LONGEST_PAUSE_SECONDS)
                if self._control.stopping.wait(pause):
                    if not last or time.monotonic() - began > LONGEST_PAUSE_SECONDS:
                        raise Stopped from error
                    time.sleep(pause)
