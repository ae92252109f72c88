"""A whole run on services that are running already: fed and watched until it ends."""

import asyncio

from quartet_client.async_client import AsyncClient
from quartet_client.data import RunData
from quartet_client.feeder import keep_fed
from quartet_client.view import RunView
from quartet_client.watching import watch_progress
from quartet_common.config import LoadedConfig


async def feed_and_watch(config: LoadedConfig, data: RunData, client: AsyncClient, view: RunView) -> None:
    """Create the run, feed it and show it until it ends; `view.progress` tells how.

    The run goes on without this process: cancelled, it can be attached to again.

    Raises:
        QuartetError: the broker cannot be reached, or refuses the run or its prompts.
    """
    await client.create_run(config.run)
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
