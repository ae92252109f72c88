"""The trainer's session with the broker. All calls block.

`lease` is for the fetching thread, everything else for the loop's thread.

While the broker is unavailable, calls are retried; all are idempotent. If the session is fenced, because another
trainer opened the run, calls raise `SessionLost`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

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
_RESULTS_PER_CALL = 32
_MOST_DEAD = 1000

# ABORTED: retry. RESOURCE_EXHAUSTED: a limit is reached. Without a retry delay, waiting may not help (a message is too
# large), and the time counts toward `patience`.
_LATER = frozenset({grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED})

Answer = TypeVar("Answer")


@dataclass
class Batch:
    """A step's batch; without groups if the manifest is not granted."""

    manifest: broker_pb2.BatchManifest
    groups: list[experience_pb2.ExperienceGroup] = field(default_factory=list)


class BrokerSession:
    """The session of a run. Call `open` first."""

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
        """`patience`: seconds for which calls are retried while the broker is unavailable."""
        self._channel = channel
        self.stub = broker_pb2_grpc.BrokerServiceStub(channel)
        self._peer = peer
        self._run_id = run_id
        self._holder = holder
        self._control = control
        self._status = status
        self._patience = patience
        self.epoch = -1

    def wait_for_run(self, while_waiting: Callable[[], None]) -> broker_pb2.Run:
        """Wait without limit for the broker and for the run to be created; call `while_waiting` between attempts.

        Raises:
            Stopped: the trainer was asked to stop.
            TrainingError: the broker refused the handshake or the call.
        """
        handshake_done, outage = False, Outage()
        while True:
            try:
                if not handshake_done:
                    handshake(self._channel, common_pb2.SERVICE_KIND_TRAINER, timeout=5.0)
                    handshake_done = True
                run = self.stub.GetRun(broker_pb2.GetRunRequest(run_id=self._run_id), timeout=CALL_SECONDS).run
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
        """Open a session from a checkpoint of `checkpoint_step` steps. The answer says which steps to `settle`."""
        request = broker_pb2.OpenSessionRequest(
            run_id=self._run_id,
            holder=self._holder,
            checkpoint_step=checkpoint_step,
            settles_ledger=True,
            first_remembered_pass=first_remembered_pass,
        )
        answer = self._call(self.stub.OpenSession, request)
        self.epoch = answer.session_epoch
        return answer

    def settle(self, lines: Sequence[tuple[int, Sequence[str]]]) -> int:
        """Send (step, instance ids) of the next steps that the broker's books lack. Return how many instances the
        broker lacked or had in another state."""
        if self._control.stopping.is_set():
            raise Stopped
        steps = [broker_pb2.TrainedStep(step=step, instance_ids=instance_ids) for step, instance_ids in lines]
        request = broker_pb2.SettleTrainedRequest(run_id=self._run_id, session_epoch=self.epoch, steps=steps)
        return self._call(self.stub.SettleTrained, request).settled

    def lease(self, step: int, cancelled: WakeEvent) -> Batch | None:
        """Wait a few seconds for the batch of `step`. None: `cancelled` was set, by any thread."""
        request = broker_pb2.LeaseExperienceRequest(
            run_id=self._run_id,
            session_epoch=self.epoch,
            step=step,
            wait=to_duration(LEASE_WAIT_SECONDS),
            max_groups_per_message=MAX_GROUPS_PER_MESSAGE,
        )
        return self._retry(f"LeaseExperience of step {step}", lambda: self._lease_once(request, cancelled))

    def _lease_once(self, request: broker_pb2.LeaseExperienceRequest, cancelled: WakeEvent) -> Batch | None:
        call = self.stub.LeaseExperience(request, timeout=LEASE_WAIT_SECONDS + CALL_SECONDS)
        batch: Batch | None = None
        with cancelled.may_cancel(call):
            try:
                for part in call:
                    if part.WhichOneof("part") == "manifest":
                        batch = Batch(part.manifest)
                    elif batch is not None:
                        # Earlier brokers send one group per message, in `group`.
                        batch.groups += part.groups.groups or [part.group]
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.CANCELLED and cancelled.wait(0):
                    return None
                raise
        if batch is None:
            raise TrainingError(f"{self._peer}: LeaseExperience of step {request.step} returned no manifest")
        if batch.manifest.granted and len(batch.groups) != len(batch.manifest.instance_ids):
            raise TrainingError(
                f"{self._peer}: the batch of step {request.step} has {len(batch.groups)} groups, "
                f"its manifest {len(batch.manifest.instance_ids)}"
            )
        return batch

    def rollout_of(self, instance_id: str) -> str:
        """Return the id of the rollout that put a group; "unknown" if the broker has no record of it."""
        request = broker_pb2.GetGroupRequest(run_id=self._run_id, instance_id=instance_id)
        group = self._call(self.stub.GetGroup, request)
        put = [moment.who for moment in group.moments if moment.kind == broker_pb2.GROUP_MOMENT_KIND_PUT]
        return (put and put[-1]) or "unknown"

    def drop(self, step: int, instance_ids: Sequence[str], reason: str) -> int:
        """Drop groups from a step's batch permanently. Return how many were dropped."""
        request = broker_pb2.DropExperienceRequest(
            run_id=self._run_id, session_epoch=self.epoch, step=step, instance_ids=instance_ids, reason=reason
        )
        return self._call(self.stub.DropExperience, request).dropped

    def mark_trained(self, step: int, instance_ids: Sequence[str]) -> int:
        """Report that the step's batch, these instances, is in the weights. Return the new policy version."""
        request = broker_pb2.MarkTrainedRequest(
            run_id=self._run_id, session_epoch=self.epoch, step=step, instance_ids=instance_ids
        )
        return self._call(self.stub.MarkTrained, request, f" of step {step}").policy_version

    def commit(self, step: int) -> broker_pb2.CommitResponse:
        """Report that steps below `step` are durable."""
        request = broker_pb2.CommitRequest(run_id=self._run_id, session_epoch=self.epoch, step=step)
        return self._call(self.stub.Commit, request, f" of {step} steps", last=True)

    def finish(self, state: broker_pb2.RunState, reason: str, ending: broker_pb2.RunEnding, step: int) -> None:
        """End the run, all `step` steps of which are committed."""
        request = broker_pb2.FinishRunRequest(
            run_id=self._run_id, state=state, reason=reason, ending=ending, committed_step=step
        )
        self._call(self.stub.FinishRun, request, last=True)

    def run(self) -> broker_pb2.Run:
        """Return the run with its current state and counts."""
        request = broker_pb2.GetRunRequest(run_id=self._run_id)
        return self._call(self.stub.GetRun, request, last=True).run

    def dead(self) -> Sequence[broker_pb2.DeadPrompt]:
        """Return the first dead prompts, at most 1,000; none if the call fails."""
        request = broker_pb2.ListDeadRequest(run_id=self._run_id, limit=_MOST_DEAD)
        try:
            return self._call(self.stub.ListDead, request, last=True).dead
        except TrainingError as error:
            log.warning("dead prompts cannot be listed: %s", error)
            return []

    def start_evaluation(self, name: str, version: int) -> broker_pb2.StartEvaluationResponse | None:
        """Queue a set for evaluation at a policy version. None: no prompts of the set have been submitted yet."""
        request = broker_pb2.StartEvaluationRequest(run_id=self._run_id, evaluation_set=name, policy_version=version)

        def call() -> broker_pb2.StartEvaluationResponse | None:
            try:
                return self.stub.StartEvaluation(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    return None
                raise

        return self._retry(f"StartEvaluation of '{name}'", call)

    def wait_for_evaluation(self, evaluation_id: str, wait: float) -> broker_pb2.GetEvaluationResponse | None:
        """Wait until an evaluation is complete, at most `wait` seconds. None: the loop's `WakeEvent` was set."""
        request = broker_pb2.GetEvaluationRequest(
            run_id=self._run_id, evaluation_id=evaluation_id, wait=to_duration(wait), summary_only=True
        )

        def call() -> broker_pb2.GetEvaluationResponse | None:
            answer = self.stub.GetEvaluation.future(request, timeout=wait + CALL_SECONDS)
            try:
                with self._control.wake.may_cancel(answer):
                    return answer.result()
            except grpc.FutureCancelledError:
                return None

        return self._retry("GetEvaluation", call)

    def evaluation_results(self, evaluation_id: str) -> broker_pb2.GetEvaluationResponse:
        """Return an evaluation with the transcripts that it has so far; one that cannot be fetched is empty."""
        request = broker_pb2.GetEvaluationRequest(run_id=self._run_id, evaluation_id=evaluation_id)

        def call() -> broker_pb2.GetEvaluationResponse:
            try:
                return self.stub.GetEvaluation(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED or request.summary_only:
                    raise
                request.summary_only = True  # the transcripts are too large for one message
                return self.stub.GetEvaluation(request, timeout=CALL_SECONDS)

        found = self._retry("GetEvaluation", call)
        if request.summary_only:
            names = [header.instance_id for header in found.headers]
            for first in range(0, len(names), _RESULTS_PER_CALL):
                found.transcripts.extend(self._transcripts(names[first : first + _RESULTS_PER_CALL]))
        return found

    def _transcripts(self, instance_ids: Sequence[str]) -> list[bytes]:
        request = broker_pb2.CollectResultsRequest(run_id=self._run_id, instance_ids=instance_ids)

        def call() -> list[bytes]:
            try:
                return [result.transcript for result in self.stub.CollectResults(request, timeout=CALL_SECONDS)]
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED):
                    return [b""] * len(instance_ids)  # one was deleted, or the broker is of an earlier release
                raise

        return self._retry("CollectResults", call)

    def _call(self, rpc: Callable[..., Answer], request: Message, of: str = "", last: bool = False) -> Answer:
        """`_retry` a unary call of `stub`; `of` is added to its name in errors and logs."""
        name = request.DESCRIPTOR.name.removesuffix("Request")
        return self._retry(name + of, partial(rpc, request, timeout=CALL_SECONDS), last)

    def _retry(self, what: str, call: Callable[[], Answer], last: bool = False) -> Answer:
        """Call, and retry while the broker is unavailable.

        `last`: after a stop request, still retry until `LONGEST_PAUSE_SECONDS` have passed since the first attempt.

        Raises:
            Stopped: the trainer was asked to stop while the broker was unavailable.
            SessionLost: the broker answered FAILED_PRECONDITION.
            TrainingError: the broker stayed unavailable, or answered with another error.
        """
        began, outage = time.monotonic(), Outage(self._patience)
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
                delay = retry_delay(error)
                may_help = delay is not None or error.code() == grpc.StatusCode.ABORTED
                pause = outage.failed(delay, answered=error.code() in _LATER and may_help)
                if outage.given_up:
                    raise TrainingError(
                        f"{what}: {self._peer.explain(error)}; retried for {outage.seconds:.0f} s "
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
