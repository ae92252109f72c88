"""Sleep: a rollout lets somebody else have its accelerator's memory for a while, a trainer on the same GPU mostly."""

from typing import cast

from quartet_common.errors import failed_precondition, invalid_argument, unavailable, unimplemented
from quartet_common.log import get_logger
from quartet_rollout.engines.base import EngineError, SleepLevel
from quartet_rollout.state import RolloutState

log = get_logger(__name__)

AWAKE = 0
_LEVELS = (AWAKE, 1, 2)


async def set_sleep(state: RolloutState, level: int) -> int:
    """Put the engine to sleep, or wake it; return the policy version that it has then. Raises ContractError.

    Asleep, nothing is leased or generated, and leases of what was running are kept.
    """
    if level not in _LEVELS:
        raise invalid_argument("level", level, "0 (awake), 1 or 2")
    if (engine := state.engine) is None:
        raise unavailable("engine", "it is still loading", retry_after_seconds=1.0)
    if level != AWAKE and "sleep" not in engine.capabilities():
        raise unimplemented("level", "this engine cannot sleep; allowed: 0, or a rollout with the capability 'sleep'")
    if level != AWAKE and state.sleep_level not in (AWAKE, level):
        raise failed_precondition("level", f"it sleeps at level {state.sleep_level}: wake it first")
    if state.updating:
        raise failed_precondition("rollout", "it is taking new weights: ask again when they are installed")
    before, state.sleep_level = state.sleep_level, max(level, state.sleep_level)
    try:
        if level != AWAKE:
            await engine.sleep(cast(SleepLevel, level))
        else:
            await engine.wake()
    except EngineError as error:
        state.sleep_level = before
        raise unavailable("engine", str(error)) from error
    state.sleep_level = level
    state.changes.notify()
    if level != before:
        log.info("the engine sleeps" if level else "the engine is awake", extra={"level": level})
    return engine.policy_version
