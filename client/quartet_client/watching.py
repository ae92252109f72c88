"""Follows a run until it ends: its events, its counts, its services, into a RunProgress and its view."""

import asyncio
from contextlib import suppress

from quartet_client.async_client import AsyncClient
from quartet_client.connection import KINDS
from quartet_client.errors import QuartetError
from quartet_client.outage import wait_for
from quartet_client.view import RunView

_DRAW_SECONDS = 0.3
_ASK_SECONDS = 2.0


async def watch_progress(client: AsyncClient, view: RunView, stop: asyncio.Event | None = None) -> None:
    """Fold everything about the view's run into its progress, and show it, until the run ends or `stop` is set.

    When it returns, `view.progress.ended` and `.succeeded` tell how the run ended, if it did.

    Raises:
        QuartetError: there is no such run, or the broker is away for too long.
    """
    stop = stop or asyncio.Event()
    view.progress.fold_run(await client.run(view.progress.run_id))
    following = asyncio.create_task(_follow(client, view))
    aside: list[asyncio.Task] = [asyncio.create_task(stop.wait())]
    aside += [asyncio.create_task(_draw(view, stop)), asyncio.create_task(_ask_run(client, view, stop))]
    aside += [asyncio.create_task(_ask_service(client, view, kind, stop)) for kind in KINDS]
    try:
        done, _ = await asyncio.wait([following, *aside], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (following, *aside):
            task.cancel()
        await asyncio.gather(following, *aside, return_exceptions=True)


async def _follow(client: AsyncClient, view: RunView) -> None:
    async for event in client.watch(view.progress.run_id, view.progress.last_event_id):
        view.progress.fold(event)
        view.tell(event)


async def _draw(view: RunView, stop: asyncio.Event) -> None:
    while not stop.is_set():
        view.refresh()
        await wait_for(stop, _DRAW_SECONDS)


async def _ask_run(client: AsyncClient, view: RunView, stop: asyncio.Event) -> None:
    while not stop.is_set():
        # A broker that is away shows in its own row; the counts are then those of its last answer.
        with suppress(QuartetError):
            view.progress.fold_run(await client.run(view.progress.run_id))
        await wait_for(stop, _ASK_SECONDS)


async def _ask_service(client: AsyncClient, view: RunView, kind: str, stop: asyncio.Event) -> None:
    """One task for each service: one that does not answer keeps none of the others waiting."""
    while not stop.is_set():
        view.progress.fold_service(await client.service(kind))
        await wait_for(stop, _ASK_SECONDS)
