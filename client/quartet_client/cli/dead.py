"""`quartet dead`: the prompts that were set aside."""

import dataclasses

import click
from quartet.v1 import experience_pb2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quartet_client.async_client import AsyncClient
from quartet_client.cli.options import Target, asynchronous, json_option, targeted
from quartet_client.cli.output import console, group_fields, print_json, show_group
from quartet_client.errors import InputError
from quartet_client.models import DeadPrompt, Handle, enum_name
from quartet_client.terminal import echo
from quartet_common.text import one_line


@click.group()
def dead() -> None:
    """List, show and requeue prompts that were set aside: after too many failures, or with completions to be scored."""


@dead.command("list")
@click.argument("run_id", metavar="RUN")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Most to list.")
@json_option
@targeted
@asynchronous
async def list_dead(target: Target, run_id: str, limit: int, as_json: bool) -> int:
    """List the dead prompts of RUN with the reasons, oldest first."""
    async with target.client() as client:
        found, total = await client.dead(run_id, limit)
    if as_json:
        print_json({"total": total, "dead": found})
        return 0
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("instance", "prompt", "attempts", "died", "kept", "reasons"):
        table.add_column(heading)
    for prompt in found:
        reasons = Text("\n".join(map(one_line, dict.fromkeys(prompt.reasons))))
        died = f"{prompt.died_at:%Y-%m-%d %H:%M:%S}"
        kept = "completions" if prompt.unscored_bytes else "nothing"
        table.add_row(prompt.instance_id, prompt.prompt_id, str(prompt.attempts), died, kept, reasons)
    console().print(table if found else f"no dead prompts in run {run_id}")
    if total > len(found):
        echo(f"{total - len(found)} more: use --limit")
    return 0


@dead.command()
@click.argument("run_id", metavar="RUN")
@click.argument("instance_ids", metavar="INSTANCE...", nargs=-1, required=True)
@json_option
@targeted
@asynchronous
async def show(target: Target, run_id: str, instance_ids: tuple[str, ...], as_json: bool) -> int:
    """Show dead prompts whole: the prompt, its reference and verifiers, why each attempt failed, completions kept."""
    async with target.client() as client:
        found, _ = await client.dead(run_id, limit=10_000, instance_ids=instance_ids)
        missing = set(instance_ids) - {prompt.instance_id for prompt in found}
        if missing:
            raise await _not_dead(client, run_id, min(missing))
        kept = {
            prompt.instance_id: await client.unscored(Handle(run_id, prompt.instance_id))
            for prompt in found
            if prompt.unscored_bytes
        }
    if as_json:
        told = []
        for prompt in found:
            group = kept.get(prompt.instance_id)
            told.append({**dataclasses.asdict(prompt), "unscored": group_fields(group) if group else None})
        print_json(told)
        return 0
    for prompt in found:
        _show(console(), prompt)
        if prompt.instance_id in kept:
            console().print("completions that are kept to be scored:")
            show_group(console(), kept[prompt.instance_id])
    return 0


async def _not_dead(client: AsyncClient, run_id: str, instance_id: str) -> InputError:
    place = await client.place(Handle(run_id, instance_id))
    return InputError(f"prompt '{instance_id}' of run '{run_id}' is not dead: it is {place.state.replace('_', ' ')}")


def _show(out: Console, dead: DeadPrompt) -> None:
    prompt = dead.instance.prompt
    facts = {
        "instance": dead.instance_id,
        "prompt": dead.prompt_id,
        "purpose": f"{enum_name(experience_pb2.Purpose, dead.instance.purpose)}, data pass {dead.instance.data_pass}",
        "died": f"{dead.died_at:%Y-%m-%d %H:%M:%S} after {dead.attempts} attempt{'s'[: dead.attempts != 1]}",
        **{f"attempt {n}": reason for n, reason in enumerate(dead.reasons, 1)},
        "verifiers": Text("\n".join(map(_one_line, prompt.verifiers)) or "the run's"),
        "reference": _one_line(prompt.reference) or "none",
        "sampling": _one_line(prompt.sampling) or "the run's",
        **{f"note {name}": note for name, note in prompt.metadata.items()},
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    out.print(table)
    out.print(Text(_input(prompt)), "")


def _one_line(message) -> str:
    return " ".join(str(message).split())


def _input(prompt: experience_pb2.Prompt) -> str:
    match prompt.WhichOneof("input"):
        case "chat":
            return "\n".join(f"{message.role}: {message.content}" for message in prompt.chat.messages)
        case "text":
            return prompt.text
        case "token_ids":
            return f"{prompt.token_ids.shape[0]} token ids"
    return "no input"


@dead.command()
@click.argument("run_id", metavar="RUN")
@click.argument("instance_ids", metavar="[INSTANCE]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead prompts of the run.")
@json_option
@targeted
@asynchronous
async def requeue(target: Target, run_id: str, instance_ids: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Put dead prompts of RUN back into the queue. Completions that are kept are scored, not generated again."""
    if bool(instance_ids) == everything:
        raise click.UsageError("name the instances to requeue, or give --all")
    async with target.client() as client:
        requeued = await client.requeue_dead(run_id, instance_ids)
    if as_json:
        print_json({"requeued": requeued}, indent=None)
    else:
        echo(f"{requeued} prompt{'' if requeued == 1 else 's'} queued again")
    return 0
