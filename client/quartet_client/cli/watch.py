"""`quartet watch`: the live picture of a run."""

import click

from quartet_client.cli.options import Target, asynchronous, targeted
from quartet_client.cli.output import console
from quartet_client.errors import InputError
from quartet_client.progress import RunProgress
from quartet_client.view import RunView
from quartet_client.watching import watch_progress


@click.command()
@click.argument("run_id", metavar="RUN", required=False)
@click.option("--plain", is_flag=True, help="A line per step instead of a live picture.")
@targeted
@asynchronous
async def watch(target: Target, run_id: str | None, plain: bool) -> int:
    """Show RUN until it ends. Exit status 1 if it ended by a failure."""
    progress = RunProgress(run_id or target.config().run.id)
    async with target.client() as client:
        with RunView(progress, console(), plain or None) as view:
            await watch_progress(client, view)
    return 0 if progress.succeeded else 1


@click.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def top(arguments: tuple[str, ...]) -> None:
    """Say which commands show what `quartet top` showed."""
    raise InputError(
        f"'quartet {' '.join(('top', *arguments))}' is gone; allowed: quartet status (services), quartet runs show RUN "
        "(queues), quartet watch RUN or quartet dashboard (rates, staleness, idle shares)"
    )
