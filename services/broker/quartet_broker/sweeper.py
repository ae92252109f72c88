"""What time does: leases and members end, results are let go, Redis comes and goes, gauges follow the counts."""

import asyncio

from quartet.v1 import broker_pb2

from quartet_broker.runs import Runs
from quartet_broker.store import Store
from quartet_common import metrics
from quartet_common.errors import ContractError
from quartet_common.host import ServiceHost
from quartet_common.log import get_logger

log = get_logger(__name__)

_COUNTS = metrics.gauge("quartet_broker_run", "RunStats of each run.", ["run", "count"])
_FIELDS = [field.name for field in broker_pb2.RunStats.DESCRIPTOR.fields]
# A finished run has only results to let go.
_FINISHED_EVERY = 60


class Sweeper:
    """Sweeps all runs at an interval, and keeps the service's health true to Redis' state."""

    def __init__(self, store: Store, runs: Runs, host: ServiceHost, interval: float):
        self._store = store
        self._runs = runs
        self._host = host
        self._interval = interval
        self._serving = True
        self._finished: set[str] = set()
        self._round = 0

    async def run(self) -> None:
        """Sweep until the service stops."""
        while not self._host.stopping.is_set():
            try:
                await self._sweep()
                await self._report(serving=True)
            except ContractError as error:
                await self._report(serving=False, reason=error.message)
            try:
                async with asyncio.timeout(self._interval):
                    await self._host.stopping.wait()
            except TimeoutError:
                continue

    async def _report(self, serving: bool, reason: str = "") -> None:
        if serving == self._serving or self._host.stopping.is_set():
            return
        self._serving = serving
        await self._host.set_serving(serving)
        if serving:
            self._host.waiting.discard("Redis")
            log.info("Redis is back")
        else:
            self._host.waiting.add("Redis")
            log.warning("not serving: %s", reason)

    async def _sweep(self) -> None:
        await self._store.ping()
        self._round += 1
        run_ids = await self._runs.ids()
        for run_id in run_ids:
            if run_id in self._finished and self._round % _FINISHED_EVERY:
                continue
            (reply,) = await self._store.run_many("sweep", run_id, [()], missing_ok=True)
            if reply[0] == b"NOT_FOUND":
                # Deleted, half deleted, or just about to be made.
                await self._runs.purge_if_deleting(run_id)
                continue
            if reply[2]:
                log.info("leases expired", extra={"run": run_id, "count": reply[2]})
            await self._gauge(run_id)
            if reply[1] != b"ACTIVE":
                self._finished.add(run_id)
        self._finished &= set(run_ids)

    async def _gauge(self, run_id: str) -> None:
        stats = (await self._runs.load(run_id)).stats
        for field in _FIELDS:
            _COUNTS.labels(run_id, field).set(getattr(stats, field))
