"""The engine's sleep, which frees its accelerator for another process. It ends by a call, by a weight update, or if it
is not renewed in time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from quartet_common.errors import failed_precondition, invalid_argument, unavailable, unimplemented
from quartet_common.log import get_logger
from quartet_rollout.engines.base import Engine, EngineError, SleepLevel
from quartet_rollout.state import RolloutState

log = get_logger(__name__)

AWAKE = 0
_LEVELS = (AWAKE, 1, 2)


class Sleep:
    """Puts the engine to sleep and wakes it, one call at a time.

    A sleeping engine leases and generates nothing; leases of its running groups are still renewed.
    """

    def __init__(self, state: RolloutState, spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task]):
        """`spawn(coroutine, name)` runs a task whose failure stops the service."""
        self._state, self._spawn = state, spawn
        self._lock = asyncio.Lock()
        self._alarm: asyncio.Task | None = None

    async def set(self, level: int, seconds: float = 0.0) -> int:
        """Sleep at a level, or wake (0); return the policy version afterwards. Raises ContractError.

        Args:
            seconds: after which the engine wakes unless the call is repeated; 0: no limit.
        """
        if level not in _LEVELS:
            raise invalid_argument("level", level, "0 (awake), 1 or 2")
        if (engine := self._state.engine) is None:
            raise unavailable("engine", "it is still loading", retry_after_seconds=1.0)
        if level != AWAKE and "sleep" not in engine.capabilities():
            raise unimplemented(
                "level", "this engine cannot sleep; allowed: 0, or a rollout with the capability 'sleep'"
            )
        # Shielded: a cancelled call would leave it unknown whether the engine sleeps, and a sleep without its timer.
        task = asyncio.create_task(self._set(engine, level, seconds))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieved by a cancelled call too
        return await asyncio.shield(task)

    async def _set(self, engine: Engine, level: int, seconds: float) -> int:
        state = self._state
        async with self._lock:
            if level != AWAKE and state.sleep_level not in (AWAKE, level):
                raise failed_precondition("level", f"it sleeps at level {state.sleep_level}: wake it first")
            if state.updating:
                raise failed_precondition("rollout", "a weight update is in progress: call again when it has ended")
            try:
                await self._change(level)
            except EngineError as error:
                raise unavailable("engine", str(error)) from error
            if level != AWAKE and seconds:
                self._alarm = self._spawn(self._wake_after(seconds), "wake")
        return engine.policy_version

    async def end(self) -> None:
        """Wake the engine if it sleeps, also during a weight update. Raises EngineError."""
        async with self._lock:
            if self._state.sleep_level != AWAKE:
                await self._change(AWAKE)

    async def _wake_after(self, seconds: float) -> None:
        """Wake the engine after a time. `_change` cancels this task when the sleep is renewed or ended."""
        while True:
            await asyncio.sleep(seconds)
            if self._state.updating:  # the update's end wakes it
                continue
            log.warning("the sleep was not renewed within %g s: the engine wakes", seconds)
            try:
                await self.end()
                return
            except EngineError as error:
                log.error("the engine does not wake, trying again: %s", error)

    async def _change(self, level: int) -> None:
        """Change the level, with the lock held. Raises EngineError, and then keeps the level."""
        state = self._state
        assert state.engine is not None
        before, state.sleep_level = state.sleep_level, max(level, state.sleep_level)
        try:
            if level != AWAKE:
                await state.engine.sleep(cast(SleepLevel, level))
            else:
                await state.engine.wake()
        except Exception as error:  # an engine of another package may raise anything
            state.sleep_level = before
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"{type(error).__name__}: {error}") from error
        state.sleep_level = level
        if self._alarm is not None and self._alarm is not asyncio.current_task():
            self._alarm.cancel()
        state.changes.notify()
        if level != before:
            log.info("the engine sleeps" if level else "the engine is awake", extra={"level": level})
