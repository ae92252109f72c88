"""`quartet audit`: proves that each prompt group counted exactly once, or says which did not."""

import dataclasses
from pathlib import Path

import click

from quartet_client.audit_sources import audit_run, checkpoint_folder
from quartet_client.cli.options import Target, asynchronous, json_option, targeted
from quartet_client.cli.output import print_json
from quartet_client.terminal import echo


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The trainer's checkpoints. Default: those of the run file, or runs/RUN/checkpoints.",
)
@json_option
@targeted
@asynchronous
async def audit(target: Target, run_id: str, checkpoints: Path | None, as_json: bool) -> int:
    """Compare what the broker did with each prompt group of RUN with what is in the newest checkpoint's weights.

    Exit status 0 if each group that the run used up counted exactly once, 1 if not.
    """
    folder = checkpoints or checkpoint_folder(target.path, target.overrides, run_id)
    async with target.client() as client:
        report = await audit_run(client, run_id, folder)
    if as_json:
        print_json({**dataclasses.asdict(report), "ok": report.ok})
        return 0 if report.ok else 1
    echo(report.sentence())
    for fault in report.faults:
        echo(f"  {fault}")
    return 0 if report.ok else 1
