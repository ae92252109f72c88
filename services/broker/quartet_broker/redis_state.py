"""In which state Redis is: in the log when it changes and once a minute, in the metrics, in the health."""

from quartet_broker.metrics import REDIS
from quartet_broker.store import AWAY, FULL, REFUSING, Store
from quartet_common.errors import ContractError
from quartet_common.host import ServiceHost
from quartet_common.log import get_logger
from quartet_common.outage import Outage

log = get_logger(__name__)

OK = "ok"
HEALTH = "redis"
"""Name of Redis' own health: SERVING while it takes everything."""
_WAITING = {
    OK: "",
    AWAY: "an answer of Redis",
    FULL: "room in Redis: its memory is full",
    REFUSING: "Redis to take writes",
}


class RedisState:
    """Takes what each sweep finds, and shows it."""

    def __init__(self, store: Store, host: ServiceHost):
        self._store = store
        self._host = host
        self._state = ""
        self._outage = Outage()

    async def look(self, failure: ContractError | None) -> None:
        """Find the state after a sweep that went well, or failed.

        The service stays healthy while Redis is full: that refuses experience and prompts only, and whoever took the
        broker out of service for it would keep out the trainer's commit, which is what frees memory.
        """
        full = ""
        if failure is None:
            try:
                full = await self._store.full()
            except ContractError as error:
                failure = error
        if failure is not None:
            await self._take(self._store.trouble, failure.message)
        elif full:
            await self._take(FULL, f"experience and prompts are refused until a commit frees memory; {full}")
        else:
            await self._take(OK)

    async def _take(self, state: str, reason: str = "") -> None:
        if self._host.stopping.is_set():
            return
        if state != self._state:
            before, self._state = self._state, state
            for name, thing in _WAITING.items():
                REDIS.labels(name).set(name == state)
                self._host.waiting.discard(thing)
            if state != OK:
                self._host.waiting.add(_WAITING[state])
            elif before:
                log.info("Redis is back; it was %s for %.0f s", before, self._outage.seconds)
            self._outage.over()
            await self._host.set_serving(state in (OK, FULL))
            await self._host.set_health(HEALTH, state == OK)
        if state != OK:
            self._outage.failed()
            if self._outage.to_be_logged():
                log.warning("Redis is now %s: %s", state, reason, extra={"repeated": 0})  # each change is written
