"""`quartet run`: a whole run from its run file."""

import asyncio
from pathlib import Path
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from quartet_client.async_client import AsyncClient
from quartet_client.cli.options import Target, the_launcher, with_broker
from quartet_client.cli.output import console, print_json
from quartet_client.connection import Outage
from quartet_client.data import DataSection, RunData
from quartet_client.errors import QuartetError
from quartet_client.feed import feed_and_watch, take_up
from quartet_client.progress import RunProgress, accuracy_text
from quartet_client.view import RunView
from quartet_common.config import LoadedConfig
from quartet_common.run_spec import run_spec


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--attach", is_flag=True, help="Use the services that are running already instead of starting them here.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
@click.option("--broker", metavar="HOST:PORT", help="Address of the broker.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="With --attach: how long to wait for a broker that is not there yet.",
)
@click.option("--dry-run", is_flag=True, help="Check everything with every service, print what would run, and stop.")
@click.option("--plain", is_flag=True, help="A line per step instead of a live picture.")
def run(
    file: Path,
    attach: bool,
    overrides: tuple[str, ...],
    broker: str | None,
    wait: float,
    dry_run: bool,
    plain: bool,
) -> int:
    """Run FILE.toml: start the four services on this machine, feed them, and show the run until it ends.

    With --attach the services are already running, here or elsewhere: the run is made there, fed and shown. Ctrl-C then
    leaves the run as it is, and the same command takes it up again.
    """
    overrides = with_broker(overrides, broker)
    if not attach:
        with the_launcher("start the services yourself and use --attach"):
            from quartet_local.preflight import check_run
            from quartet_local.run import run as run_locally
        if not dry_run:
            return run_locally(file, list(overrides), plain)
        plan = check_run(file, overrides)
        print_json(_plan(plan.config, plan.data, attach))
        return 0
    config = Target(file, overrides).config()
    data = RunData.load(config)
    if dry_run:
        print_json(_plan(config, data, attach))
        return 0
    return asyncio.run(_attach(config, data, wait, plain or None))


def _plan(config: LoadedConfig, data: RunData, attach: bool) -> dict[str, Any]:
    passes = data.section.passes
    return {
        "run": MessageToDict(run_spec(config.run), preserving_proto_field_name=True),
        "folder": str(config.run.path),
        "model": str(config.model.path) if config.model.path else None,
        "services": "those running at [addresses]" if attach else "started on this machine",
        "addresses": config.addresses.model_dump(),
        "data": {
            "train": str(data.section.train),
            "prompts": len(data.train),
            "passes": passes or "until run.max_steps",
            "prompt_instances": len(data.train) * passes if passes else None,
            "evaluation": {name: len(prompts) for name, prompts in data.evaluation.items()},
        },
    }


async def _until_there(
    client: AsyncClient, config: LoadedConfig[DataSection], data: RunData, patience: float, out: Console
) -> None:
    """Wait for the broker, which may be started after this command. Raises QuartetError if it does not come."""
    outage, told = Outage(patience, f"run '{config.run.id}'"), patience == 0
    while True:
        try:
            await take_up(config, data, client)
            return
        except QuartetError as error:
            await outage.ride_out(error)
            if not told:
                out.print(f"waiting for the broker at {config.addresses.broker}", soft_wrap=True)
                told = True


async def _attach(config: LoadedConfig[DataSection], data: RunData, wait: float, plain: bool | None) -> int:
    model = config.model.path.name if config.model.path else ""
    progress = RunProgress(config.run.id, model=model, max_steps=config.run.max_steps)
    out = console()
    async with AsyncClient(**config.addresses.model_dump(), security=config.security) as client:
        await _until_there(client, config, data, wait, out)
        await feed_and_watch(config, data, client, RunView(progress, out, plain))
    for name, points in progress.evaluations.items():
        known = [point for point in points if point.accuracy is not None] or points
        ends = [accuracy_text(point.accuracy, point.interval, point.judged) for point in (known[0], known[-1])]
        out.print(f"accuracy on {name}: {points[-1].incomplete or ' → '.join(ends)}", soft_wrap=True)
    return 0 if progress.succeeded else 1
