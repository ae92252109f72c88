"""A whole run on services that are running already: fed and watched until it ends."""

import asyncio
import math

import grpc

from quartet_client.async_client import AsyncClient
from quartet_client.data import RunData
from quartet_client.errors import QuartetError
from quartet_client.feed import keep_fed
from quartet_client.runs import Run
from quartet_client.view import RunView
from quartet_client.watching import watch_progress
from quartet_common.config import LoadedConfig


async def take_up(config: LoadedConfig, data: RunData, client: AsyncClient) -> Run:
    """Make the run, or go on with the one that stands: a finished one, too, if the run file asks for more.

    More are a higher run.max_steps, and more data.passes where the prompts had ended and the steps had not.

    Raises:
        QuartetError: the broker cannot be reached, or refuses the run; e.g. one that failed does not go on.
    """
    try:
        stands = await client.run(config.run.id)
    except QuartetError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
        return await client.create_run(config.run)
    more_steps = (config.run.max_steps or math.inf) > (stands.spec.max_steps or math.inf)
    more_passes = stands.prompts_ended and (data.section.passes or math.inf) > stands.newest_data_pass + 1
    return await client.create_run(config.run, extend=more_steps or (more_passes and stands.ending != "max_steps"))


async def feed_and_watch(config: LoadedConfig, data: RunData, client: AsyncClient, view: RunView) -> None:
    """Create the run, feed it and show it until it ends; `view.progress` tells how.

    The run goes on without this process: cancelled, it can be attached to again.

    Raises:
        QuartetError: the broker cannot be reached, or refuses the run or its prompts.
    """
    await take_up(config, data, client)
    stop = asyncio.Event()
    feeding = asyncio.create_task(keep_fed(config, client, stop, data))
    watching = asyncio.create_task(watch_progress(client, view))
    try:
        with view:
            # Feeding ends with the run, or by an error that the watcher would wait for in vain.
            await asyncio.wait([feeding, watching], return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                await feeding
            await watching
    finally:
        stop.set()
        for task in (feeding, watching):
            task.cancel()
        await asyncio.gather(feeding, watching, return_exceptions=True)
