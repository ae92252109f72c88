"""`quartet trace`: a group's life."""

from datetime import UTC, datetime
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from quartet_client.cli.options import Target, asynchronous, json_option, run_option, targeted
from quartet_client.cli.output import completion_text, console, print_json
from quartet_client.dashboard.metrics_file import MetricsFile
from quartet_client.history import GroupLife, Moment
from quartet_client.models import Handle
from quartet_common.text import one_line

_STYLES = {"returned": "yellow", "dead": "red", "dropped": "yellow", "committed": "green", "delivered": "green"}


@click.command()
@click.argument("group_id", metavar="GROUP_ID")
@run_option
@json_option
@targeted
@asynchronous
async def trace(target: Target, group_id: str, run_id: str | None, as_json: bool) -> int:
    """Print what became of the prompt instance GROUP_ID: leases, failures, generation, step, weights.

    From the broker's records, and from the run's folder where it is at hand: the broker forgets the oldest lives
    (`broker.remembered_lives`), events and transcripts of a long run.
    """
    config = target.config()
    async with target.client() as client:
        life = await client.life(Handle(run_id or config.run.id, group_id))
    recorded = _recorded(config.run.path, life)
    moments = sorted([*life.moments, *recorded], key=lambda moment: moment.at)
    if as_json:
        print_json({**_fields(life), "moments": moments, "group": life.group})
        return 0
    out = console()
    out.print(_headline(life))
    out.print(_table(moments) if moments else Text("  the broker no longer keeps what happened to it", "dim"))
    if life.group:
        for completion in life.group.completions:
            out.print(completion_text(completion))
    if life.traceparent:
        out.print(Text(f"OpenTelemetry trace {life.traceparent.split('-')[1]}", "dim"))
    return 0


def _fields(life: GroupLife) -> dict[str, object]:
    names = ("run_id", "instance_id", "state", "attempt", "holder", "step", "policy_version", "traceparent")
    return {name: getattr(life, name) for name in names}


def _headline(life: GroupLife) -> Text:
    text = Text.assemble("group ", (one_line(life.instance_id), "bold"), f" of run {life.run_id}: ")
    text.append(life.state.replace("_", " "), _STYLES.get(life.state, "bold"))
    if life.attempt:
        text.append(f", delivered {'once' if life.attempt == 1 else f'{life.attempt} times'}")
    if life.holder:
        text.append(one_line(f", held by {life.holder}"))
    if life.step >= 0:
        text.append(f", step {life.step}")
    if life.policy_version >= 0:
        text.append(f", carried by version {life.policy_version}")
    return text


def _table(moments: list[Moment]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for heading in ("time (UTC)", "after", "what", "who"):
        table.add_column(heading, no_wrap=heading != "who", overflow="fold")
    table.add_column("detail", ratio=1)
    before = moments[0].at
    for moment in moments:
        what = Text(moment.kind.replace("_", " "), _STYLES.get(moment.kind, ""))
        seconds = (moment.at - before).total_seconds()
        at = f"{moment.at.astimezone(UTC):%Y-%m-%d %H:%M:%S}.{moment.at.microsecond // 1000:03}"
        table.add_row(at, f"{seconds:+.3f} s", what, moment.who, moment.detail)
        before = moment.at
    return table


def _recorded(folder: Path, life: GroupLife) -> list[Moment]:
    """Return what the run's folder tells of its step that the broker's events do not."""
    if life.step < 0 or life.state not in ("trained", "committed"):
        return []
    if any(moment.kind == "trained" for moment in life.moments):
        return []
    for row in MetricsFile(folder / "metrics.jsonl").read()[1]:
        if row.get("kind") == "step" and row.get("step") == life.step and "time" in row:
            detail = f"step {life.step} made version {life.step + 1} (metrics.jsonl)"
            return [Moment(datetime.fromtimestamp(row["time"], UTC), "trained", detail=detail)]
    return []
