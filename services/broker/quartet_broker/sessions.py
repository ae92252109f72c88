"""The trainer's session: OpenSession, MarkTrained, Commit."""

from typing import Any

from quartet.v1 import broker_pb2

from quartet_broker import validation
from quartet_broker.dead import Dead
from quartet_broker.runs import Runs
from quartet_broker.store import Store
from quartet_common.errors import failed_precondition
from quartet_common.log import get_logger

log = get_logger(__name__)

_CHUNK = 1000


def refuse(run_id: str, step: int, reply: list[Any]) -> None:
    """Raise what a script's refusal of a call of the session means."""
    match reply[0]:
        case b"FENCED":
            newest = int(reply[1])
            if newest == 0:
                raise failed_precondition(f"session of run '{run_id}'", "none was opened: call OpenSession first")
            raise failed_precondition(f"session of run '{run_id}'", f"it is fenced: the newest session is {newest}")
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
    """One trainer at a time; what it trained is let go only once a checkpoint holds it."""

    def __init__(self, store: Store, runs: Runs, dead: Dead):
        self._store = store
        self._runs = runs
        self._dead = dead

    async def open(self, request: broker_pb2.OpenSessionRequest) -> broker_pb2.OpenSessionResponse:
        """Fence earlier sessions and rewind to the checkpoint."""
        run_id = validation.name("run_id", request.run_id)
        validation.identifier("holder", request.holder)
        validation.integer("checkpoint_step", request.checkpoint_step, 0)
        reply = await self._store.run("open_session", run_id, request.holder, request.checkpoint_step)
        if reply[0] == b"BEHIND":
            committed = int(reply[1])
            raise failed_precondition(
                f"checkpoint_step {request.checkpoint_step}",
                f"run '{run_id}' is committed up to step {committed} and keeps no earlier batch: start from the "
                f"checkpoint of step {committed} or a later one, or make a new run",
            )
        _, epoch, replayable = reply
        # Each of these is atomic and may be repeated; the caller leases nothing before it has this call's answer.
        found = 0
        for start in range(0, len(request.consumed_instance_ids), _CHUNK):
            ids = request.consumed_instance_ids[start : start + _CHUNK]
            settled = await self._store.run("settle_consumed", run_id, epoch, *ids)
            refuse(run_id, request.checkpoint_step, settled)
            found += settled[1]
        await self._commit(run_id, epoch, request.checkpoint_step)
        log.info(
            "session opened",
            extra={"run": run_id, "epoch": epoch, "step": request.checkpoint_step, "replayable": replayable},
        )
        if found:
            log.info("instances of the checkpoint were not settled yet", extra={"run": run_id, "count": found})
        if (await self._runs.load(run_id)).state == broker_pb2.RUN_STATE_ACTIVE:
            await self._score_again(run_id)
        return broker_pb2.OpenSessionResponse(
            session_epoch=epoch, replayable_steps=replayable, run=await self._runs.load(run_id)
        )

    async def _score_again(self, run_id: str) -> None:
        """Queue the dead whose completions are kept: since they died the verifier may have been mended."""
        requeued = await self._dead.requeue_unscored(run_id)
        if requeued:
            text = f"{requeued} group{'s'[: requeued != 1]} that no verifier could score will be scored again"
            notice = broker_pb2.Notice(level="warning", text=text, source="broker")
            await self._store.run("add_event", run_id, broker_pb2.RunEvent(notice=notice).SerializeToString())

    async def mark_trained(self, request: broker_pb2.MarkTrainedRequest) -> broker_pb2.MarkTrainedResponse:
        """Record that a step's batch is in the weights."""
        run_id = validation.name("run_id", request.run_id)
        validation.integer("step", request.step, 0)
        reply = await self._store.run("mark_trained", run_id, request.session_epoch, request.step)
        refuse(run_id, request.step, reply)
        return broker_pb2.MarkTrainedResponse(policy_version=request.step + 1)

    async def commit(self, request: broker_pb2.CommitRequest) -> broker_pb2.CommitResponse:
        """Let go of the groups of all steps below `step`."""
        run_id = validation.name("run_id", request.run_id)
        validation.integer("step", request.step, 0)
        groups = await self._commit(run_id, request.session_epoch, request.step)
        return broker_pb2.CommitResponse(committed=groups)

    async def _commit(self, run_id: str, epoch: int, step: int) -> int:
        groups, left = 0, 1
        while left:
            reply = await self._store.run("commit", run_id, epoch, step)
            refuse(run_id, step, reply)
            groups += reply[1]
            left = reply[2]
        return groups
