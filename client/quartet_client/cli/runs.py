"""`quartet runs` and `quartet audit`: the runs of a broker."""

import dataclasses
from pathlib import Path

import click
from google.protobuf.json_format import MessageToDict
from rich.table import Table

from quartet_client.audit import audit_run, checkpoint_folder
from quartet_client.cli.options import Target, asynchronous, json_option, targeted
from quartet_client.cli.output import console, print_json
from quartet_client.models import Member, Run
from quartet_client.terminal import echo


@click.group()
def runs() -> None:
    """List, show, finish and delete runs."""


@runs.command("list")
@json_option
@targeted
@asynchronous
async def list_runs(target: Target, as_json: bool) -> int:
    """List all runs, newest first."""
    async with target.client() as client:
        found = await client.runs()
    if as_json:
        print_json(found)
        return 0
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("run", "state", "version", "committed", "queued", "dead", "created", "reason"):
        table.add_column(heading)
    for run in found:
        counts = [str(count) for count in (run.policy_version, run.committed_step, run.stats.queued, run.stats.dead)]
        table.add_row(run.run_id, run.state, *counts, f"{run.created_at:%Y-%m-%d %H:%M}", run.reason)
    console().print(table if found else "no runs")
    return 0


@runs.command()
@click.argument("run_id", metavar="RUN")
@json_option
@targeted
@asynchronous
async def show(target: Target, run_id: str, as_json: bool) -> int:
    """Show one run: state, counts, members, specification."""
    async with target.client() as client:
        run = await client.run(run_id)
    if as_json:
        print_json(run)
    else:
        _show(run)
    return 0


def _show(run: Run) -> None:
    out = console()
    line = f"run {run.run_id} of {run.created_at:%Y-%m-%d %H:%M} is {run.state}"
    line += f", version {run.policy_version}, {run.committed_step} steps committed"
    line += ", all prompts are submitted" if run.prompts_ended else ""
    out.print(line + (f": {run.reason}" if run.reason else ""), soft_wrap=True)
    counts = {name: getattr(run.stats, name) for name in run.stats.__slots__}
    for title, rows in (
        ("counts", [(name.replace("_", " "), f"{count:,}") for name, count in counts.items()]),
        ("members", [(member.instance_id, _member(member)) for member in run.members]),
        ("specification", [(name, str(value)) for name, value in _fields(run).items()]),
    ):
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
        )
        table.add_column(style="dim")
        table.add_column()
        for name, value in rows or [("none", "")]:
            table.add_row(name, value)
        out.print(table)


def _member(member: Member) -> str:
    waits = f", waits for {member.waiting_for}" if member.waiting_for else ""
    return f"{member.kind} at {member.address}, {member.state}, version {member.policy_version}{waits}"


def _fields(run: Run) -> dict:
    return MessageToDict(run.spec, preserving_proto_field_name=True)


@runs.command()
@click.argument("run_id", metavar="RUN")
@click.option(
    "--state", type=click.Choice(["cancelled", "failed", "succeeded"]), default="cancelled", show_default=True
)
@click.option("--reason", default="ended by quartet runs finish", help="Why, in words.")
@json_option
@targeted
@asynchronous
async def finish(target: Target, run_id: str, state: str, reason: str, as_json: bool) -> int:
    """End a run: no more leases, rollouts and trainer stop. A first outcome stands."""
    async with target.client() as client:
        run = await client.finish_run(run_id, state, reason)
    print_json(run) if as_json else echo(f"run {run.run_id} is {run.state}: {run.reason}")
    return 0


@runs.command()
@click.argument("run_id", metavar="RUN")
@click.option("--force", is_flag=True, help="Also if it has not ended.")
@json_option
@targeted
@asynchronous
async def delete(target: Target, run_id: str, force: bool, as_json: bool) -> int:
    """Remove a finished run and all its data from the broker. Its folder stays."""
    async with target.client() as client:
        deleted = await client.delete_run(run_id, force)
    if as_json:
        print_json({"run_id": run_id, "deleted": deleted}, indent=None)
    else:
        echo(f"run {run_id} is deleted" if deleted else f"there was no run {run_id}")
    return 0


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
