"""The trainer's session: OpenSession, SettleTrained, MarkTrained, Commit."""

from collections.abc import Sequence
from typing import Any

from quartet.v1 import broker_pb2

from quartet_broker import scripts, validation
from quartet_broker.events import state_event
from quartet_broker.results import DeadLetters
from quartet_broker.runs import Runs
from quartet_broker.store import Store
from quartet_common.errors import failed_precondition
from quartet_common.log import get_logger

log = get_logger(__name__)

_CHUNK = 1000


def refuse(run_id: str, step: int, reply: list[Any]) -> None:
    """Raise the error for a script's reply if it refuses the session's call."""
    match reply[0]:
        case b"FENCED":
            newest = int(reply[1])
            if newest == 0:
                raise failed_precondition(f"session of run '{run_id}'", "none was opened: call OpenSession first")
            raise failed_precondition(f"session of run '{run_id}'", f"it is fenced: the newest session is {newest}")
        case b"UNSETTLED":
            raise failed_precondition(
                f"session of run '{run_id}'",
                f"the broker's books end at step {int(reply[1])}, the checkpoint has {int(reply[2])}: send the steps "
                "between by SettleTrained first",
            )
        case b"OTHER_BATCH":
            description = (
                "the broker has another batch for it than the one that was trained: Redis was restored from an earlier "
                "state; open a session with the newest checkpoint"
            )
            raise failed_precondition(f"step {step} of run '{run_id}'", description)
        case b"GAP":
            description = f"the next step to be settled is {int(reply[1])}; send all steps from there on"
            raise failed_precondition(f"step {step} of run '{run_id}'", description)
        case b"BEYOND":
            description = f"the session began with a checkpoint of {int(reply[1])} steps, so that it cannot be in there"
            raise failed_precondition(f"step {step} of run '{run_id}'", description)
        case b"COMMITTED":
            description = f"it is committed, as are all steps below {int(reply[1])}; its batch is gone"
            raise failed_precondition(f"step {step} of run '{run_id}'", description)
        case b"TRAINED":
            raise failed_precondition(f"step {step} of run '{run_id}'", "it is marked trained; its batch is final")
        case b"NOT_GRANTED":
            description = "its batch is not granted, or not whole: call LeaseExperience first"
            raise failed_precondition(f"step {step} of run '{run_id}'", description)
        case b"OUT_OF_ORDER":
            description = f"the run is at step {int(reply[1])}; open a session with the newest checkpoint"
            raise failed_precondition(f"step {step} of run '{run_id}'", description)


class Sessions:
    """Admits one trainer at a time, and keeps what it trained until a checkpoint contains it."""

    def __init__(self, store: Store, runs: Runs, dead: DeadLetters):
        self._store = store
        self._runs = runs
        self._dead = dead

    async def open(self, request: broker_pb2.OpenSessionRequest) -> broker_pb2.OpenSessionResponse:
        """Fence earlier sessions and rewind to the checkpoint."""
        run_id = validation.name("run_id", request.run_id)
        validation.identifier("holder", request.holder)
        validation.version("checkpoint_step", request.checkpoint_step)
        validation.integer("first_remembered_pass", request.first_remembered_pass, 0)
        consumed = request.consumed_instance_ids
        validation.count("consumed_instance_ids", consumed, validation.MOST_CONSUMED_IDS, least=0)
        resumed = state_event(broker_pb2.RUN_STATE_ACTIVE, f"resumed at step {request.checkpoint_step}")
        reply = await self._store.run(
            scripts.OPEN_SESSION,
            run_id,
            request.holder,
            request.checkpoint_step,
            int(request.settles_ledger),
            len(consumed),
            request.first_remembered_pass,
            resumed if request.checkpoint_step else "",
        )
        if reply[0] == b"BEHIND":
            committed = int(reply[1])
            raise failed_precondition(
                f"checkpoint_step {request.checkpoint_step}",
                f"run '{run_id}' is committed up to step {committed} and keeps no earlier batch: start from the "
                f"checkpoint of step {committed} or a later one, or make a new run",
            )
        if reply[0] == b"UNCOVERED":
            missing, covered = int(reply[1]), int(reply[2])
            raise failed_precondition(
                f"checkpoint_step {request.checkpoint_step}",
                f"the broker's books of run '{run_id}' lack the steps {missing} to {covered - 1}: Redis was restored "
                "from an earlier state, and the trainer sent no ids for them. Upgrade the trainer to one that sends "
                f"its ledger (settles_ledger), or restore a Redis that has {covered} steps",
            )
        _, epoch, replayable, committed, trained, ledger = reply
        checkpoint = request.checkpoint_step
        if trained < checkpoint:
            log.warning(
                f"books at step {trained}, checkpoint at step {checkpoint}: Redis was restored from an earlier state, "
                "or lost the end of its log, or the run was rolled back; what the checkpoint contains is settled first",
                extra={"run": run_id},
            )
        response = broker_pb2.OpenSessionResponse(session_epoch=epoch, replayable_steps=replayable)
        if request.settles_ledger:
            response.settle_from_step = committed
            steps, _, digest = ledger.decode().partition(" ")
            response.ledger_digest = digest if steps == str(committed) else ""
        else:
            await self._settle_consumed(run_id, epoch, consumed)
            await self._commit(run_id, epoch, checkpoint, opening=True)
        log.info(
            "session opened",
            extra={"run": run_id, "epoch": epoch, "step": checkpoint, "replayable": replayable},
        )
        if (await self._runs.load(run_id)).state == broker_pb2.RUN_STATE_ACTIVE:
            await self._score_again(run_id)
        response.run.CopyFrom(await self._runs.load(run_id))
        return response

    async def _settle_consumed(self, run_id: str, epoch: int, ids: Sequence[str]) -> None:
        """Settle the ids that the checkpoint contains, in chunks; no batch is leased before OpenSession returns."""
        found = 0
        for start in range(0, len(ids), _CHUNK):
            settled = await self._store.run(scripts.SETTLE_CONSUMED, run_id, epoch, *ids[start : start + _CHUNK])
            refuse(run_id, 0, settled)
            found += settled[1]
        if found:
            log.info("instances of the checkpoint were not settled yet", extra={"run": run_id, "count": found})

    async def settle_trained(self, request: broker_pb2.SettleTrainedRequest) -> broker_pb2.SettleTrainedResponse:
        """Settle the next steps of the checkpoint that the session began with, each step atomically."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("steps", request.steps, 4096)
        first = validation.version("steps[0].step", request.steps[0].step)
        for n, line in enumerate(request.steps):
            validation.integer(f"steps[{n}].step", line.step, first + n, first + n)
            validation.count(f"steps[{n}].instance_ids", line.instance_ids, validation.MOST_IDS, least=0)
            for name in line.instance_ids:
                validation.identifier(f"steps[{n}].instance_ids", name)
        calls = [(request.session_epoch, line.step, *line.instance_ids) for line in request.steps]
        response = broker_pb2.SettleTrainedResponse()
        for line, reply in zip(
            request.steps, await self._store.run_many(scripts.SETTLE_TRAINED, run_id, calls), strict=True
        ):
            refuse(run_id, line.step, reply)
            response.settled_steps = reply[1]
            response.settled += reply[2]
        return response

    async def _score_again(self, run_id: str) -> None:
        """Requeue the dead prompts whose completions are kept: the verifier may have been fixed since."""
        requeued = await self._dead.requeue_unscored(run_id)
        if requeued:
            text = f"{requeued} group{'s'[: requeued != 1]} that no verifier could score will be scored again"
            notice = broker_pb2.Notice(level="warning", text=text, source="broker")
            await self._store.run(
                scripts.ADD_EVENT, run_id, broker_pb2.RunEvent(notice=notice).SerializeToString(), 0, ""
            )

    async def mark_trained(self, request: broker_pb2.MarkTrainedRequest) -> broker_pb2.MarkTrainedResponse:
        """Record that a step's batch is in the weights."""
        run_id = validation.name("run_id", request.run_id)
        validation.version("step", request.step)
        validation.count("instance_ids", request.instance_ids, validation.MOST_IDS, least=0)
        reply = await self._store.run(
            scripts.MARK_TRAINED, run_id, request.session_epoch, request.step, *request.instance_ids
        )
        refuse(run_id, request.step, reply)
        return broker_pb2.MarkTrainedResponse(policy_version=request.step + 1)

    async def commit(self, request: broker_pb2.CommitRequest) -> broker_pb2.CommitResponse:
        """Delete the groups of all steps below `step`."""
        run_id = validation.name("run_id", request.run_id)
        validation.version("step", request.step)
        return await self._commit(run_id, request.session_epoch, request.step)

    async def _commit(self, run_id: str, epoch: int, step: int, opening: bool = False) -> broker_pb2.CommitResponse:
        response, left = broker_pb2.CommitResponse(), 1
        while left:
            reply = await self._store.run(scripts.COMMIT, run_id, epoch, step, int(opening))
            refuse(run_id, step, reply)
            _, groups, left, response.first_remembered_pass = reply
            response.committed += groups
        return response
