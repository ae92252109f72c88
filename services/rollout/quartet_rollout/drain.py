"""The drain of a rollout, which takes it out of its run while its process stays; another call ends it."""

import asyncio
import time

from quartet.v1 import rollout_pb2

from quartet_common.errors import aborted, unavailable
from quartet_common.log import get_logger
from quartet_rollout.groups import Groups
from quartet_rollout.membership import Membership
from quartet_rollout.state import DrainStage, RolloutState
from quartet_server.host import ServiceHost

log = get_logger(__name__)

_WAITS = "the end of its drain (quartet drain --undo)"


class Drain:
    """Begins and ends the drain. `Membership` leaves the run at DrainStage.LEAVING, and stays out of it."""

    def __init__(self, state: RolloutState, groups: Groups, membership: Membership, host: ServiceHost):
        self._state, self._groups, self._membership, self._host = state, groups, membership, host
        self._answer = rollout_pb2.SetDrainResponse()
        self._leaving: asyncio.Task | None = None

    async def begin(self, grace: float) -> rollout_pb2.SetDrainResponse:
        """Drain, and return when the rollout has left its run. Groups that have begun may take `grace` seconds.

        Raises ContractError: the engine is loading, or `end` was called meanwhile. If cancelled, the drain goes on.
        """
        state = self._state
        if state.engine is None:
            raise unavailable("engine", "it is still loading", retry_after_seconds=1.0)
        if state.drain is DrainStage.NONE:
            log.info("draining")
            self._host.waiting.add(_WAITS)
            self._enter(DrainStage.FINISHING)
            self._leaving = self._host.spawn(self._leave(time.monotonic() + grace), "drain")
        if self._leaving is not None:
            await asyncio.wait([self._leaving])
        if state.drain is DrainStage.NONE:
            raise aborted("drain", "it was ended by another call; call again if the rollout is to leave")
        return self._answer

    async def _leave(self, deadline: float) -> None:
        state, before = self._state, self._state.groups_total
        run_id = state.run_id if state.active else ""
        while state.drain is DrainStage.FINISHING and len(self._groups) and (left := deadline - time.monotonic()) > 0:
            await state.changes.wait(left)
        if state.drain is DrainStage.FINISHING:
            held, put = len(self._groups), state.groups_total
            self._enter(DrainStage.LEAVING if self._membership.registered else DrainStage.OUT)
            while state.drain is DrainStage.LEAVING:
                await state.changes.wait()
            finished, given_back = state.groups_total - before, held - (state.groups_total - put)
            self._answer = rollout_pb2.SetDrainResponse(run_id=run_id, finished=finished, given_back=given_back)

    def end(self) -> rollout_pb2.SetDrainResponse:
        """Let the rollout work again."""
        self._host.waiting.discard(_WAITS)
        self._enter(DrainStage.NONE)
        return rollout_pb2.SetDrainResponse(run_id=self._state.run_id)

    def _enter(self, stage: DrainStage) -> None:
        self._state.drain = stage
        self._state.changes.notify()
