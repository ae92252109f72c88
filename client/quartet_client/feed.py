"""The feeder: creates a run from its run file and keeps its queue filled until the prompts, or the run, end.

It may be stopped and started again at any time: creating the run is idempotent, and the broker recognizes prompts that
it has by their instance ids.
"""

import asyncio
import math
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import grpc
from quartet.v1 import broker_pb2

from quartet_client.async_client import AsyncClient
from quartet_client.connection import BrokerOutage, wait_for
from quartet_client.data import RunData
from quartet_client.errors import QuartetError
from quartet_client.models import Run
from quartet_client.streams import MAX_INSTANCES, batches, submit_batch
from quartet_client.view import RunView, watch_progress
from quartet_common import tracing
from quartet_common.config import LoadedConfig
from quartet_common.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

START_PATIENCE = 60.0  # seconds for the broker to come up
PATIENCE = 600.0  # seconds for a broker that was there to come back


@dataclass
class FeedReport:
    """The result of `feed`.

    Attributes:
        submitted: training prompt instances that were new.
        known: training prompt instances that had been submitted before.
        ended_by: what ended it: all prompts were submitted, the run ended, or the stop event.
    """

    submitted: int = 0
    known: int = 0
    ended_by: Literal["prompts", "run", "stop"] = "stop"


class _Stopped(Exception):
    """The stop event was set."""


async def feed(
    config: LoadedConfig, client: AsyncClient, stop_event: asyncio.Event, data: RunData | None = None
) -> FeedReport:
    """Create the run, submit its evaluation sets, then its training prompts as the queue has room; end the prompts.

    Args:
        config: the run file; [run] and [data] are read.
        stop_event: set it to stop feeding; the run stays as it is.
        data: the prompts, if they are loaded already.

    Raises:
        InputError: [data] or one of its files is invalid; nothing was created.
        QuartetError: the run exists with another specification, or the broker is away for too long.
    """
    data = data or RunData.load(config)
    tracing.configure("client", f"{socket.gethostname()}-{os.getpid()}", config.tracing)
    feeder = _Feeder(config, client, stop_event, data)
    with suppress(_Stopped):
        await feeder.feed()
    report = feeder.report
    log.info("feeding ended", extra={"by": report.ended_by, "new": report.submitted, "known": report.known})
    return report


async def keep_fed(
    config: LoadedConfig,
    client: AsyncClient,
    stop_event: asyncio.Event,
    data: RunData | None = None,
    look_seconds: float = 15.0,
) -> FeedReport:
    """Feed until the run ends; feed again when the broker has lost the end of the prompts (Redis was restored).

    Args, Raises: as `feed`.
    """
    what = f"state of run '{config.run.id}'"
    while (report := await feed(config, client, stop_event, data)).ended_by == "prompts":
        with suppress(_Stopped):
            while not await wait_for(stop_event, look_seconds):
                run = await _retrying(lambda _: client.get_run(config.run.id), PATIENCE, what, stop_event)
                if run.active and not run.prompts_ended:
                    log.warning("the broker has lost the end of the prompts; submitting again from the first prompt")
                    break
                if not run.active:
                    return report
        if stop_event.is_set():
            break
    return report


async def _retrying(
    call: Callable[[BrokerOutage], Awaitable[T]], patience: float, what: str, stop_event: asyncio.Event
) -> T:
    """Return the call's result; retry while the broker is away. Raises _Stopped, QuartetError."""
    outage = BrokerOutage(patience, what, stop_event)
    while not stop_event.is_set():
        try:
            return await call(outage)
        except QuartetError as error:
            await outage.wait_or_raise(error)
    raise _Stopped


class _Feeder:
    def __init__(self, config: LoadedConfig, client: AsyncClient, stop: asyncio.Event, data: RunData):
        self._config = config
        self._client = client
        self._stop = stop
        self._data = data
        self.report = FeedReport()
        self._last = ""  # id of the last submitted instance

    async def feed(self) -> None:
        """Feed until the prompts or the run end. Raises _Stopped, QuartetError."""
        run = await self._retrying(lambda _: self._client.create_run(self._config.run), "creation", START_PATIENCE)
        while run.active and not run.prompts_ended:
            try:
                await self._submit_all(run)
                break
            except QuartetError as error:
                if error.code is grpc.StatusCode.ABORTED:
                    log.warning(f"submitting again from the first prompt: {error}")
                    self._last = ""
                    continue
                if error.code is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                run = await self._client.get_run(run.run_id)
                if run.active and not run.prompts_ended:
                    raise
        self.report.ended_by = "prompts" if run.active else "run"

    async def _submit_all(self, run: Run) -> None:
        # A batch must fit into the queue, and should not have to wait until all of it is empty.
        most = max(1, min(MAX_INSTANCES, run.spec.max_queued_prompts // 4))
        for name in self._data.evaluation:
            for batch in batches(self._data.evaluation_instances(name), most):
                await self._submit(run, batch, name)
        for batch in batches(self._data.training_instances(), most):
            answer = await self._submit(run, batch)
            self.report.submitted += answer.accepted
            self.report.known += answer.duplicates
        await self._retrying(lambda _: self._client.end_prompts(run.run_id, self._last), "end of the prompts")

    async def _submit(self, run: Run, batch: list, evaluation_set: str = "") -> broker_pb2.SubmitPromptsResponse:
        connections = self._client.connections
        answer = await self._retrying(
            lambda outage: submit_batch(
                connections, run.run_id, batch, evaluation_set, follows=self._last, stop=self._stop, outage=outage
            ),
            "prompts",
        )
        if answer is None:
            raise _Stopped
        self._last = batch[-1].instance_id
        return answer

    async def _retrying(self, call: Callable[[BrokerOutage], Awaitable[T]], what: str, patience: float = PATIENCE) -> T:
        return await _retrying(call, patience, f"{what} of run '{self._config.run.id}'", self._stop)


async def create_or_extend(config: LoadedConfig, data: RunData, client: AsyncClient) -> Run:
    """Create the run, or continue the existing one, even if it has finished and the run file asks for more.

    That is a higher run.max_steps, or more data.passes where the run did not end by its max_steps.

    Raises:
        QuartetError: the broker cannot be reached, or refuses the run, e.g. because it has failed.
    """
    try:
        existing = await client.get_run(config.run.id)
    except QuartetError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
        return await client.create_run(config.run)
    more_steps = (config.run.max_steps or math.inf) > (existing.spec.max_steps or math.inf)
    more_passes = existing.prompts_ended and (data.section.passes or math.inf) > existing.newest_data_pass + 1
    return await client.create_run(config.run, extend=more_steps or (more_passes and existing.ending != "max_steps"))


async def feed_and_watch(
    config: LoadedConfig, data: RunData, client: AsyncClient, view: RunView, patience: float = 0.0
) -> None:
    """Create the run, feed it and show it until it ends; `view.progress` then has its final state.

    When this is cancelled the run goes on, and may be attached to again.

    Args:
        patience: seconds to wait for a broker that is not up yet.

    Raises:
        QuartetError: the broker cannot be reached, or refuses the run or its prompts.
    """
    outage, made = BrokerOutage(patience, f"run '{config.run.id}'"), None
    while made is None:
        try:
            made = await create_or_extend(config, data, client)
        except QuartetError as error:
            await outage.wait_or_raise(error)
            if outage.to_be_logged():
                view.console.print(f"waiting for the broker at {config.addresses.broker}", soft_wrap=True)
    stop = asyncio.Event()
    feeding = asyncio.create_task(keep_fed(config, client, stop, data))
    watching = asyncio.create_task(watch_progress(client, view))
    try:
        with view:
            # Feeding ends with the run, or with an error: then the run may never end, and watching must stop.
            await asyncio.wait([feeding, watching], return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                await feeding
            await watching
    finally:
        stop.set()
        for task in (feeding, watching):
            task.cancel()
        await asyncio.gather(feeding, watching, return_exceptions=True)
