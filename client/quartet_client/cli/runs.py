"""`quartet runs`, `audit` and `dead`: the runs of a broker, and the prompts that were set aside."""

import dataclasses
from pathlib import Path

import click
from google.protobuf.json_format import MessageToDict
from quartet.v1 import experience_pb2
from rich.text import Text

from quartet_client.async_client import AsyncClient
from quartet_client.audit import audit_run, checkpoint_folder
from quartet_client.cli.options import (
    Target,
    asynchronous,
    checkpoints_option,
    connected,
    facts,
    json_option,
    print_json,
    show_group,
    table,
    targeted,
)
from quartet_client.errors import InputError
from quartet_client.events import state_words
from quartet_client.from_proto import enum_name
from quartet_client.models import DeadPrompt, Handle, Member, Run, SourceStats, group_fields
from quartet_client.terminal import Terminal, echo
from quartet_common.text import one_line

run_argument = click.argument("run_id", metavar="RUN")


@click.group()
def runs() -> None:
    """List, show, finish and delete runs."""


@runs.command("list")
@json_option
@connected
async def list_runs(client: AsyncClient, as_json: bool) -> int:
    """List all runs, newest first."""
    found = await client.list_runs()
    if as_json:
        print_json(found)
        return 0
    headings = ("run", "state", "version", "committed", "queued", "dead", "created", "reason")
    rows = []
    for run in found:
        counts = [str(count) for count in (run.policy_version, run.committed_step, run.stats.queued, run.stats.dead)]
        rows.append([run.run_id, run.state, *counts, f"{run.created_at:%Y-%m-%d %H:%M}", run.reason])
    Terminal().print(table(headings, rows) if found else "no runs")
    return 0


@runs.command()
@run_argument
@json_option
@connected
async def show(client: AsyncClient, run_id: str, as_json: bool) -> int:
    """Show one run: state, counts, members, specification."""
    run = await client.get_run(run_id)
    print_json(run) if as_json else _show(run)
    return 0


def _show(run: Run) -> None:
    out = Terminal()
    line = f"run {run.run_id} of {run.created_at:%Y-%m-%d %H:%M} {state_words(run.state)}"
    line += f", version {run.policy_version}, {run.committed_step} steps committed"
    line += ", all prompts are submitted" if run.prompts_ended else ""
    out.print(line + (f": {run.reason}" if run.reason else ""), soft_wrap=True)
    counts = {name.replace("_", " "): f"{getattr(run.stats, name):,}" for name in run.stats.__slots__}
    members = {member.instance_id: _member(member) for member in run.members}
    spec = MessageToDict(run.spec, preserving_proto_field_name=True)
    out.print(facts(counts, "counts"))
    if run.sources:
        out.print(facts({one.name: _source(one) for one in run.sources}, "sources"))
    out.print(facts(members or {"none": ""}, "members"))
    out.print(facts({name: str(value) for name, value in spec.items()}, "specification"))


def _source(one: SourceStats) -> str:
    accuracy = f"accuracy {one.accuracy:.3f}" if one.groups else "no accuracy yet"
    return f"{one.used:,} used, {one.solved:,} skipped as solved, {one.hopeless:,} as hopeless, {accuracy}"


def _member(member: Member) -> str:
    waits = f", waits for {member.waiting_for}" if member.waiting_for else ""
    return f"{member.kind} at {member.address}, {member.state}, version {member.policy_version}{waits}"


@runs.command()
@run_argument
@click.option(
    "--state",
    type=click.Choice(["cancelled", "failed", "succeeded"]),
    default="cancelled",
    show_default=True,
    help="How it ended.",
)
@click.option("--reason", default="ended by quartet runs finish", help="Why, in words.")
@json_option
@connected
async def finish(client: AsyncClient, run_id: str, state: str, reason: str, as_json: bool) -> int:
    """End a run: its rollouts and trainer stop. A run that has ended keeps its state."""
    run = await client.finish_run(run_id, state, reason)
    print_json(run) if as_json else echo(f"run {run.run_id} {state_words(run.state)}: {run.reason}")
    return 0


@runs.command()
@run_argument
@click.option("--force", is_flag=True, help="Also if it has not ended.")
@json_option
@connected
async def delete(client: AsyncClient, run_id: str, force: bool, as_json: bool) -> int:
    """Remove a finished run and all its data from the broker. Its folder stays."""
    deleted = await client.delete_run(run_id, force)
    if as_json:
        print_json({"run_id": run_id, "deleted": deleted}, indent=None)
    else:
        echo(f"run {run_id} is deleted" if deleted else f"there was no run {run_id}")
    return 0


@click.command()
@run_argument
@checkpoints_option
@json_option
@targeted
@asynchronous
async def audit(target: Target, run_id: str, checkpoints: Path | None, as_json: bool) -> int:
    """Compare the broker's record of each prompt group of RUN with the ledger of the newest checkpoint.

    Exit status 1 unless each group that the run consumed counted exactly once.
    """
    folder = checkpoints or checkpoint_folder(target.path, target.overrides, run_id)
    async with target.client() as client:
        report = await audit_run(client, run_id, folder)
    if as_json:
        print_json({**dataclasses.asdict(report), "ok": report.ok})
    else:
        for line in (report.sentence(), *(f"  {fault}" for fault in report.faults)):
            echo(line)
    return 0 if report.ok else 1


@click.group()
def dead() -> None:
    """List, show and requeue prompts that were set aside: after too many failures, or with completions to be scored."""


@dead.command("list")
@run_argument
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Most to list.")
@json_option
@connected
async def list_dead(client: AsyncClient, run_id: str, limit: int, as_json: bool) -> int:
    """List the dead prompts of RUN with the reasons, oldest first."""
    found, total = await client.list_dead(run_id, limit)
    if as_json:
        print_json({"total": total, "dead": found})
        return 0
    rows: list[list[str | Text]] = []
    for prompt in found:
        reasons = Text("\n".join(map(one_line, dict.fromkeys(prompt.reasons))))
        died = f"{prompt.died_at:%Y-%m-%d %H:%M:%S}"
        kept = "completions" if prompt.unscored_bytes else "nothing"
        rows.append([prompt.instance_id, prompt.prompt_id, str(prompt.attempts), died, kept, reasons])
    headings = ("instance", "prompt", "attempts", "died", "kept", "reasons")
    Terminal().print(table(headings, rows) if found else f"no dead prompts in run {run_id}")
    if total > len(found):
        echo(f"{total - len(found)} more: use --limit")
    return 0


@dead.command("show")
@run_argument
@click.argument("instance_ids", metavar="INSTANCE...", nargs=-1, required=True)
@json_option
@connected
async def show_dead(client: AsyncClient, run_id: str, instance_ids: tuple[str, ...], as_json: bool) -> int:
    """Show dead prompts in full: the prompt, its reference and verifiers, why each attempt failed, completions kept."""
    found, _ = await client.list_dead(run_id, limit=10_000, instance_ids=instance_ids)
    if missing := set(instance_ids) - {prompt.instance_id for prompt in found}:
        place = await client.get_group(Handle(run_id, min(missing)))
        state = place.state.replace("_", " ")
        raise InputError(f"prompt '{min(missing)}' of run '{run_id}' is not dead: it is {state}")
    out, listed = Terminal(), []
    for prompt in found:
        kept = await client.get_unscored(Handle(run_id, prompt.instance_id)) if prompt.unscored_bytes else None
        if as_json:
            listed.append({**dataclasses.asdict(prompt), "unscored": group_fields(kept) if kept else None})
            continue
        out.print(facts(_facts(prompt)))
        out.print(Text(_input(prompt.instance.prompt)), "")
        if kept:
            out.print("completions that are kept to be scored:")
            show_group(out, kept)
    if as_json:
        print_json(listed)
    return 0


def _facts(dead: DeadPrompt) -> dict[str, str | Text]:
    prompt = dead.instance.prompt
    return {
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
        case "task":
            return prompt.task
    return "no input"


@dead.command()
@run_argument
@click.argument("instance_ids", metavar="[INSTANCE]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead prompts of the run.")
@json_option
@connected
async def requeue(
    client: AsyncClient, run_id: str, instance_ids: tuple[str, ...], everything: bool, as_json: bool
) -> int:
    """Put dead prompts of RUN back into the queue. Completions that are kept are scored, not generated again."""
    if bool(instance_ids) == everything:
        raise click.UsageError("name the instances to requeue, or give --all")
    requeued = await client.requeue_dead(run_id, instance_ids)
    if as_json:
        print_json({"requeued": requeued}, indent=None)
    else:
        echo(f"{requeued} prompt{'' if requeued == 1 else 's'} queued again")
    return 0
