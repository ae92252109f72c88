"""Polls the broker, the services and metrics.jsonl for what the page shows; a failed call is made again."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import grpc

from quartet_client.async_client import AsyncClient
from quartet_client.connection import KINDS, wait_for
from quartet_client.dashboard.picture import Picture
from quartet_client.dashboard.snapshot import samples, snapshot
from quartet_client.errors import QuartetError

_logger = logging.getLogger(__name__)
_MAX_READ = 16 << 20  # bytes at one go: the page must not stop for a long run's file


class MetricsFile:
    """Follows a metrics.jsonl (docs/metrics.md), which its trainer may cut and write again from a checkpoint on.

    Attributes:
        problem: why it cannot be read, in a sentence; empty while it can, or while there is none.
    """

    def __init__(self, path: Path):
        self.path = path
        self.problem = ""
        self._position = 0
        self._last_line = b""  # the bytes before `_position`: others there mean that the file was written again

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file began anew since the last call, and its new rows, at most 16 MiB of them."""
        try:
            with self.path.open("rb") as file:
                anew = self._was_cut(file)
                if anew:
                    self._position, self._last_line = 0, b""
                file.seek(self._position)
                fresh = file.read(_MAX_READ)
        except FileNotFoundError:
            anew, fresh = self._position > 0, b""
            self._position, self._last_line, self.problem = 0, b"", ""
            return anew, []
        except OSError as error:
            self.problem = f"{self.path} cannot be read: {error.strerror}"
            return False, []
        self.problem = ""
        whole = fresh[: fresh.rfind(b"\n") + 1]  # the last line may be half written
        if whole:
            self._position += len(whole)
            self._last_line = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        rows = [row for row in (self._row(line) for line in whole.splitlines()) if row is not None]
        return anew, rows

    def _was_cut(self, file) -> bool:
        file.seek(self._position - len(self._last_line))
        return file.read(len(self._last_line)) != self._last_line

    def _row(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
        except ValueError as error:
            self.problem = f"{self.path} has a line that is no JSON: {error}"
            return None
        return row if isinstance(row, dict) else None


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
