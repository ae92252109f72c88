"""Asks everything that the page shows, over and over, until it is told to stop; whatever is away is asked again."""

import asyncio
import json
import time
from pathlib import Path

import grpc

from quartet_client.async_client import AsyncClient
from quartet_client.connection import KINDS
from quartet_client.dashboard.metrics_file import MetricsFile
from quartet_client.dashboard.picture import Picture
from quartet_client.dashboard.snapshot import samples, snapshot
from quartet_client.errors import QuartetError
from quartet_client.outage import wait_for

_ASK_SECONDS = 2.0
_DRAW_SECONDS = 0.5  # the page asks every second
_DEAD_SHOWN = 20


class Collector:
    """Keeps a Picture current, and with it what the page polls, as bytes.

    Args:
        client: of the services.
        run_id: the run; None: the newest active one, or else the newest.
        folder: of the run's records; None: runs/<id> in the working folder.

    Attributes:
        documents: the JSON of "state" and of "samples", encoded; replaced, never changed: any thread may read it.
    """

    def __init__(self, client: AsyncClient, run_id: str | None = None, folder: Path | None = None):
        self._client = client
        self._folder = folder
        self._stop = asyncio.Event()
        self._found = asyncio.Event()
        self.picture = Picture()
        self._samples_drawn = -1
        self.documents: dict[str, bytes] = {}
        if run_id:
            self._begin(run_id)
        self._draw()

    async def run(self, stop: asyncio.Event) -> None:
        """Ask until `stop` is set. Raises what is a defect; a service that is away, or a run that is not, is none."""
        self._stop = stop
        works = [self._ask_run(), self._follow(), self._read_file(), self._keep_drawn()]
        tasks = [asyncio.create_task(work) for work in (*works, *(self._ask_service(kind) for kind in KINDS))]
        try:
            done, _ = await asyncio.wait([*tasks, asyncio.create_task(stop.wait())], return_when="FIRST_COMPLETED")
            for task in done:
                task.result()
        finally:
            stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, run_id: str) -> None:
        folder = self._folder or Path("runs") / run_id
        self.picture.found(run_id, str(folder))
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._found.set()

    async def _ask_run(self) -> None:
        while not self._stop.is_set():
            try:
                await self._ask_run_once()
                self.picture.broker_answered()
            except QuartetError as error:
                if error.code is grpc.StatusCode.NOT_FOUND:
                    self.picture.broker_answered()  # it is there; the run is not, or no more
                else:
                    self.picture.broker_failed(str(error).rstrip("."))
            await wait_for(self._stop, _ASK_SECONDS)

    async def _ask_run_once(self) -> None:
        if not self._found.is_set():
            runs = await self._client.runs()
            chosen = next((run for run in runs if run.active), runs[0] if runs else None)
            if chosen is None:
                return
            self._begin(chosen.run_id)
        run = await self._client.run(self.picture.run_id)
        self.picture.fold_run(run)
        if run.stats.dead != self.picture.dead_total or (run.stats.dead and not self.picture.dead):
            self.picture.dead, self.picture.dead_total = await self._client.dead(run.run_id, _DEAD_SHOWN)

    async def _follow(self) -> None:
        """Fold the run's events. The stream rides out short outages by itself; here it is taken up after long ones."""
        await self._found.wait()
        picture = self.picture
        while not self._stop.is_set():
            try:
                async for event in self._client.watch(picture.run_id, picture.progress.last_event_id):
                    picture.fold(event)
                    picture.broker_answered()
            except QuartetError as error:
                # No run yet, or a broker that is away: `_ask_run` says so on the page.
                if error.code not in (None, grpc.StatusCode.NOT_FOUND):
                    picture.broker_failed(str(error).rstrip("."))
            await wait_for(self._stop, _ASK_SECONDS)

    async def _ask_service(self, kind: str) -> None:
        """One task for each service: one that does not answer keeps none of the others waiting."""
        while not self._stop.is_set():
            self.picture.fold_service(await self._client.service(kind))
            await wait_for(self._stop, _ASK_SECONDS)

    async def _read_file(self) -> None:
        await self._found.wait()
        while not self._stop.is_set():
            anew, rows = await asyncio.to_thread(self._file.read)
            self.picture.curves.add_file_rows(anew, rows)
            self.picture.file_problem = self._file.problem
            await wait_for(self._stop, _ASK_SECONDS)

    async def _keep_drawn(self) -> None:
        while not self._stop.is_set():
            self._draw()
            await wait_for(self._stop, _DRAW_SECONDS)

    def _draw(self) -> None:
        drawn = {**self.documents, "state": _encoded(snapshot(self.picture, time.time()))}
        if self._samples_drawn != self.picture.samples_seen:
            drawn["samples"] = _encoded(samples(self.picture))
            self._samples_drawn = self.picture.samples_seen
        self.documents = drawn


def _encoded(document: dict) -> bytes:
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
