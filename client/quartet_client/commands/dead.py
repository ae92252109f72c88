"""`quartet dead`: the prompts that were set aside."""

import click
from rich.table import Table
from rich.text import Text

from quartet_client.commands.output import console, to_json
from quartet_client.commands.target import Target, asynchronous, json_option, targeted


@click.group()
def dead() -> None:
    """List and requeue prompts that were set aside after too many failures."""


@dead.command("list")
@click.argument("run_id", metavar="RUN")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Most to list.")
@json_option
@targeted
@asynchronous
async def list_dead(target: Target, run_id: str, limit: int, as_json: bool) -> int:
    """List the dead prompts of RUN with the reasons, oldest first."""
    async with target.client() as client:
        found, total = await client.dead(run_id, limit)
    if as_json:
        click.echo(to_json({"total": total, "dead": found}, indent=2))
        return 0
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("instance", "prompt", "attempts", "died", "reasons"):
        table.add_column(heading)
    for prompt in found:
        reasons = Text("\n".join(dict.fromkeys(prompt.reasons)))
        died = f"{prompt.died_at:%Y-%m-%d %H:%M:%S}"
        table.add_row(Text(prompt.instance_id), Text(prompt.prompt_id), str(prompt.attempts), died, reasons)
    console().print(table if found else f"no dead prompts in run {run_id}")
    if total > len(found):
        click.echo(f"{total - len(found)} more: use --limit")
    return 0


@dead.command()
@click.argument("run_id", metavar="RUN")
@click.argument("instance_ids", metavar="[INSTANCE]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead prompts of the run.")
@targeted
@asynchronous
async def requeue(target: Target, run_id: str, instance_ids: tuple[str, ...], everything: bool) -> int:
    """Put dead prompts of RUN back into the queue."""
    if bool(instance_ids) == everything:
        raise click.UsageError("name the instances to requeue, or give --all")
    async with target.client() as client:
        requeued = await client.requeue_dead(run_id, instance_ids)
    click.echo(f"{requeued} prompt{'' if requeued == 1 else 's'} queued again")
    return 0
