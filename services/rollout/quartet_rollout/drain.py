"""The drain of a rollout, which takes it out of its run while its process stays; another call ends it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from quartet.v1 import rollout_pb2

from quartet_common.errors import aborted, unavailable
from quartet_common.handshake import WaitingFor
from quartet_common.log import get_logger
from quartet_rollout.groups import Groups
from quartet_rollout.membership import Membership
from quartet_rollout.state import DrainStage, RolloutState

log = get_logger(__name__)

_WAITS = "the end of its drain (quartet drain --undo)"


class Drain:
    """Begins and ends the drain. `Membership` leaves the run at DrainStage.LEAVING, and stays out of it."""

    def __init__(
        self,
        state: RolloutState,
        groups: Groups,
        membership: Membership,
        waiting: WaitingFor,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task],
    ):
        """`waiting`: what the service waits for. `spawn(coroutine, name)` runs a task."""
        self._state, self._groups, self._membership = state, groups, membership
        self._waiting, self._spawn = waiting, spawn
        self._answer = rollout_pb2.SetDrainResponse()
        self._groups_before = 0
        self._leaving: asyncio.Task | None = None

    async def begin(self, grace: float, reason: str) -> rollout_pb2.SetDrainResponse:
        """Drain, and return when the rollout has left its run. Groups that have begun may take `grace` seconds.

        Raises ContractError: the engine is loading, or `end` was called meanwhile. If cancelled, the drain goes on.
        """
        state = self._state
        if state.engine is None:
            raise unavailable("engine", "it is still loading", retry_after_seconds=1.0)
        if state.drain is DrainStage.NONE:
            log.info("draining: %s", reason or "no reason was given")
            self._answer = rollout_pb2.SetDrainResponse(run_id=state.run_id if state.active else "")
            self._groups_before = state.groups_total
            self._waiting.add(_WAITS)
            self._enter(DrainStage.FINISHING)
            self._leaving = self._spawn(self._leave(time.monotonic() + grace), "drain")
        if self._leaving is not None:
            await asyncio.wait([self._leaving])
        if state.drain is DrainStage.NONE:
            raise aborted("drain", "it was ended by another call; drain again if the rollout is to leave")
        return self._answer

    async def _leave(self, deadline: float) -> None:
        state = self._state
        while state.drain is DrainStage.FINISHING and len(self._groups):
            if (left := deadline - time.monotonic()) <= 0:
                break
            await state.changes.wait(left)
        if state.drain is DrainStage.FINISHING:
            held, put = len(self._groups), state.groups_total
            self._enter(DrainStage.LEAVING if self._membership.registered else DrainStage.OUT)
            while state.drain is DrainStage.LEAVING:
                await state.changes.wait()
            self._answer.finished = state.groups_total - self._groups_before
            self._answer.given_back = held - (state.groups_total - put)

    def end(self) -> rollout_pb2.SetDrainResponse:
        """Let the rollout work again."""
        self._waiting.discard(_WAITS)
        if self._state.drain is not DrainStage.NONE:
            log.info("the drain has ended")
            self._enter(DrainStage.NONE)
        return rollout_pb2.SetDrainResponse(run_id=self._state.run_id)

    def _enter(self, stage: DrainStage) -> None:
        self._state.drain = stage
        self._state.changes.notify()
