"""`quartet dashboard`: a run's page in the browser."""

import asyncio
import os
import signal
import sys
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path

import click
from click.core import ParameterSource

from quartet_client.async_client import AsyncClient
from quartet_client.cli.options import Target, asynchronous, run_option, targeted
from quartet_client.errors import InputError
from quartet_client.terminal import echo

_PORT = 7180
_ANSWER_SECONDS = 5.0  # a service that takes longer is told to be away, and asked again


@click.command()
@targeted
@run_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=_PORT, show_default=True, help="Port; 0: a free one.")
@click.option("--no-open", is_flag=True, help="Open no browser.")
@click.option("--allow-remote", is_flag=True, help="Listen where other machines reach it; the page has no login.")
@click.option("--until-eof", is_flag=True, hidden=True, help="End when standard input does: who started it is gone.")
@asynchronous
async def dashboard(
    target: Target,
    run_id: str | None,
    host: str,
    port: int,
    no_open: bool,
    allow_remote: bool,
    until_eof: bool,
) -> int:
    """Show a run on a page in the browser, live, until Ctrl-C.

    Without --run it is the run file's; without a run file the newest active run of the broker. The page also reads the
    run's metrics.jsonl where this machine has it: then it shows a run that is over, and all of one that began earlier.
    """
    from quartet_client.dashboard import Collector, PageServer  # reads the page's files

    config = target.config()
    named = target.path is not None or any(each.startswith("run.id") for each in target.overrides)
    chosen = run_id or (config.run.id if named else None)
    folder = config.run.folder if config.run.folder and chosen == config.run.id else None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    if until_eof:
        threading.Thread(target=_at_eof, args=(loop, stop), daemon=True).start()
    async with AsyncClient.from_config(target.path, target.overrides, _ANSWER_SECONDS) as client:
        collector = Collector(client, chosen, Path(folder) if folder else None)
        with _listening(PageServer, lambda: collector.documents, host, port, allow_remote) as server:
            echo(f"dashboard at {server.address}")
            sys.stdout.flush()
            if not no_open and has_screen():
                await asyncio.to_thread(webbrowser.open, server.address)
            await collector.run(stop)
    return 0


def _listening(server, documents, host: str, port: int, allow_remote: bool):
    """Return the server; a port that nobody chose and that is taken is replaced by a free one."""
    try:
        return server(documents, host, port, allow_remote)
    except InputError:
        source = click.get_current_context().get_parameter_source("port")
        if source is not ParameterSource.DEFAULT:
            raise
        return server(documents, host, 0, allow_remote)


def has_screen() -> bool:
    """Return whether a browser can be opened for a person: there is a display, and this is no CI."""
    graphical = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return graphical and not os.environ.get("CI")


def _at_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with suppress(OSError, ValueError):  # an unreadable standard input has ended, too
        while os.read(0, 4096):
            pass
    with suppress(RuntimeError):  # the loop is closed: the end came from elsewhere
        loop.call_soon_threadsafe(stop.set)
