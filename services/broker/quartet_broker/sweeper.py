"""Periodic work: expires leases and members, deletes old results and finished runs, reports the state of Redis."""

import asyncio

import grpc
from quartet.v1 import broker_pb2

from quartet_broker import scripts
from quartet_broker.config import BrokerSection
from quartet_broker.metrics import REDIS, RUN, RUN_ACTIVE, forget_run
from quartet_broker.runs import Runs
from quartet_broker.store import AWAY, FULL, REFUSING, Store
from quartet_common.errors import ContractError
from quartet_common.log import get_logger
from quartet_common.outage import Outage
from quartet_server.host import ServiceHost

log = get_logger(__name__)

OK = "ok"
HEALTH = "redis"
"""Name of the health status of Redis: SERVING while it accepts every call."""
_WAITING = {
    OK: "",
    AWAY: "an answer of Redis",
    FULL: "room in Redis: its memory is full",
    REFUSING: "Redis to take writes",
}


class RedisState:
    """Reports the state of Redis in health, handshake, metric and log."""

    def __init__(self, host: ServiceHost):
        self._host = host
        self._state = ""
        self._outage = Outage()

    async def report(self, state: str, reason: str = "") -> None:
        """Report the state that a sweep found.

        The service stays healthy while Redis is full: only experience and prompts are refused then, and removing the
        broker from service would block the trainer's commit, which frees memory.
        """
        if self._host.stopping.is_set():
            return
        if state != self._state:
            before, self._state = self._state, state
            for name, awaited in _WAITING.items():
                REDIS.labels(name).set(name == state)
                self._host.waiting.discard(awaited)
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


_FIELDS = [field.name for field in broker_pb2.RunStats.DESCRIPTOR.fields]
# Finished runs, of which only results expire, and runs of another layout are looked at every 60th sweep.
_SELDOM = 60
_SHOWN_SECONDS = 900.0  # how long the metrics of an ended run stay; the alerts look back as far


class Sweeper:
    """Sweeps all runs at an interval, and reports the state of Redis."""

    def __init__(self, store: Store, runs: Runs, host: ServiceHost, section: BrokerSection):
        self._store = store
        self._runs = runs
        self._host = host
        self._redis = RedisState(host)
        self._interval = section.sweep_interval
        self._finished_ttl = section.finished_run_ttl
        self._known: set[str] = set()
        self._due: dict[str, float] = {}  # of finished runs: when to sweep next, by the loop's clock
        self._purges: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Sweep until the service stops."""
        try:
            while not self._host.stopping.is_set():
                try:
                    await self._sweep()
                    full = await self._store.full()
                except ContractError as error:
                    await self._redis.report(self._store.trouble, error.message)
                else:
                    refused = "experience and prompts are refused until a commit frees memory"
                    await self._redis.report(FULL if full else OK, f"{refused}; {full}")
                try:
                    async with asyncio.timeout(self._interval):
                        await self._host.stopping.wait()
                except TimeoutError:
                    continue
        finally:
            for task in self._purges.values():
                task.cancel()
            await asyncio.gather(*self._purges.values(), return_exceptions=True)

    async def _sweep(self) -> None:
        """Sweep all runs that can be reached. Raises ContractError if a Redis server cannot."""
        failure: ContractError | None = None
        try:
            await self._store.ping()
        except ContractError as error:
            failure = error  # other servers of a Cluster may answer
        run_ids = await self._runs.ids()
        now = asyncio.get_running_loop().time()
        for run_id in run_ids:
            if self._due.get(run_id, now) > now:
                continue
            try:
                await self._sweep_run(run_id)
            except ContractError as error:
                if error.code is grpc.StatusCode.UNAVAILABLE:
                    failure = failure or error
                elif error.code is grpc.StatusCode.FAILED_PRECONDITION:  # of another build's layout
                    log.warning("not swept: %s", error.message, extra={"run": run_id})
                    self._due[run_id] = now + self._interval * _SELDOM
                elif error.code is not grpc.StatusCode.NOT_FOUND:  # deleted meanwhile
                    raise
        for run_id in self._known - set(run_ids):
            await self._forget(run_id)
        self._known |= set(run_ids)
        if failure:
            raise failure

    async def _sweep_run(self, run_id: str) -> None:
        (reply,) = await self._store.run_many(scripts.SWEEP, run_id, [()], missing_ok=True)
        if reply[0] == b"NOT_FOUND":
            # Deleted, partly deleted, or being created.
            if await self._runs.is_being_deleted(run_id):
                self._purge(run_id)
            return
        _, state, expired, hopeless, *end = reply
        if expired:
            log.info("leases expired", extra={"run": run_id, "count": expired})
        await self._runs.end_hopeless(run_id, hopeless)
        seconds = end[1] / 1000 if state != b"ACTIVE" and end else 0.0
        if seconds > _SHOWN_SECONDS:
            forget_run(run_id)
        else:
            await self._gauge(run_id)
        if state != b"ACTIVE" and end:
            await self._ended(run_id, int(end[0]), seconds)

    async def _ended(self, run_id: str, ended: int, seconds: float) -> None:
        """Delete an ended run whose `finished_run_ttl` has passed; otherwise schedule its next sweep."""
        pause = self._interval * _SELDOM
        if self._finished_ttl:
            if seconds >= self._finished_ttl:
                await self._runs.delete_ended(run_id, ended)
                return
            pause = min(pause, self._finished_ttl - seconds)
        self._due[run_id] = asyncio.get_running_loop().time() + pause

    def _purge(self, run_id: str) -> None:
        """Delete the rest of a run in the background: the scan may go through all keys of the server."""
        task = self._purges.get(run_id)
        if task is None or task.done():
            self._purges[run_id] = asyncio.create_task(self._purge_whole(run_id))

    async def _purge_whole(self, run_id: str) -> None:
        try:
            await self._runs.purge(run_id)
            log.info("the rest of a deleted run is gone", extra={"run": run_id})
        except ContractError as error:
            log.warning("run '%s' is not wholly deleted yet: %s", run_id, error.message)

    async def _gauge(self, run_id: str) -> None:
        run = await self._runs.load(run_id)
        RUN_ACTIVE.labels(run_id).set(run.state == broker_pb2.RUN_STATE_ACTIVE)
        for field in _FIELDS:
            RUN.labels(run_id, field).set(getattr(run.stats, field))

    async def _forget(self, run_id: str) -> None:
        """Forget a run that is no longer listed."""
        if await self._runs.list_again(run_id):
            log.warning("a run that was not listed any more is listed again", extra={"run": run_id})
            return
        self._known.discard(run_id)
        self._due.pop(run_id, None)
        self._purges.pop(run_id, None)
        forget_run(run_id)
