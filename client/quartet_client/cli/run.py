"""`quartet run`, `sft`, `sweep`: training from a run file; `watch`, `status`, `trace`, `dashboard`: what it does."""

import asyncio
import errno
import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from google.protobuf.json_format import MessageToDict
from rich.text import Text

from quartet_client.async_client import AsyncClient
from quartet_client.cli.options import (
    Target,
    asynchronous,
    completion_text,
    connected,
    json_option,
    print_json,
    run_option,
    table,
    targeted,
    with_broker,
)
from quartet_client.data import DataSection, RunData
from quartet_client.errors import InputError
from quartet_client.feed import feed_and_watch
from quartet_client.launcher import the_launcher
from quartet_client.models import Handle, ServiceStatus
from quartet_client.progress import RunProgress, accuracy_text, read_run, reward_text, work_of
from quartet_client.streams import GroupHistory, Moment
from quartet_client.terminal import Terminal, echo
from quartet_client.view import RunView, watch_progress
from quartet_common.config import LoadedConfig
from quartet_common.run_spec import run_spec
from quartet_common.text import one_line


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
    help="With --attach: how long to wait for a broker that is not up yet.",
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
        launcher = the_launcher("start the services yourself and use --attach")
        if not dry_run:
            return launcher.run(file, overrides, plain)
        plan = launcher.check_run(file, overrides, _warn)
        print_json(_plan(plan.config, plan.data, attach))
        return 0
    config = Target(file, overrides).config()
    data = RunData.load(config)
    if dry_run:
        print_json(_plan(config, data, attach))
        return 0
    return asyncio.run(_attach(config, data, wait, plain or None))


def _warn(line: str) -> None:
    if line.startswith("warning: "):
        echo(line, err=True)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
@click.option("--dry-run", is_flag=True, help="Check everything and read all rows, print what would run, and stop.")
def sft(file: Path, overrides: tuple[str, ...], dry_run: bool) -> int:
    """Fine-tune the model of FILE.toml on the rows of its section [sft], with the trainer alone.

    Ctrl-C ends it after a checkpoint; the same command goes on from there. The model is in the run's folder at the end.
    """
    launcher = the_launcher("start quartet-trainer FILE --sft yourself")
    if not dry_run:
        return launcher.sft(file, overrides)
    print_json(launcher.check_sft(file, overrides, _warn))
    return 0


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE,...", help="Values of a key of the run file.")
@click.option("--parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at a time.")
@click.option("--dry-run", is_flag=True, help="Check every run with every service, print the runs, and stop.")
def sweep(file: Path, overrides: tuple[str, ...], parallel: int, dry_run: bool) -> int:
    """Run FILE.toml with each combination of the values of --set, and compare the runs in a table.

    A comma in double quotes, brackets or braces belongs to its value: --set 'trainer.adam_betas=[0.9, 0.99],[0.9,
    0.95]'. Each run is called after its values, such as mine-learning_rate-1e-4. If one fails, the others go on, and
    the exit status is 1. Ctrl-C stops all; the same command continues them.
    """
    launcher = the_launcher("give each run file to quartet run --attach")
    if not dry_run:
        return launcher.sweep(file, overrides, parallel)
    print_json(launcher.check_sweep(file, overrides, parallel, _warn))
    return 0


def _plan(config: LoadedConfig, data: RunData, attach: bool) -> dict[str, Any]:
    passes = data.section.passes
    return {
        "run": MessageToDict(run_spec(config.run), preserving_proto_field_name=True),
        "folder": str(config.run.path),
        "model": str(config.model.path) if config.model.path else None,
        "services": "those running at [addresses]" if attach else "started on this machine",
        "addresses": config.addresses.model_dump(),
        "data": {
            "train": ", ".join(source.title for key, source in data.section.sources() if key.startswith("data.train")),
            "prompts": len(data.train),
            "passes": passes or "until run.max_steps",
            "prompt_instances": data.count_uses() if passes else None,
            "evaluation": {name: len(prompts) for name, prompts in data.evaluation.items()},
        },
    }


async def _attach(config: LoadedConfig[DataSection], data: RunData, wait: float, plain: bool | None) -> int:
    model = config.model.path.name if config.model.path else ""
    progress = RunProgress(config.run.id, model=model, max_steps=config.run.max_steps)
    out = Terminal()
    async with AsyncClient(**config.addresses.model_dump(), security=config.security) as client:
        await feed_and_watch(config, data, client, RunView(progress, out, plain), wait)
    for name in progress.evaluations:
        points = progress.points(name)
        known = [point for point in points if point.accuracy is not None] or points
        ends = [accuracy_text(point) for point in (known[0], known[-1])]
        out.print(f"accuracy on {name}: {points[-1].incomplete or ' → '.join(ends)}", soft_wrap=True)
        if len(points[-1].rewards) > 1:
            out.print(f"reward on {name}: {reward_text(points[0])} → {reward_text(points[-1])}", soft_wrap=True)
    return 0 if progress.succeeded else 1


@click.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--plain", is_flag=True, help="A line per step instead of a live picture.")
@targeted
@asynchronous
async def watch(target: Target, run_id: str | None, plain: bool) -> int:
    """Show RUN (by default that of the run file) until it ends. Exit status 1 unless it succeeded."""
    progress = RunProgress(run_id or target.config().run.id)
    async with target.client() as client:
        with RunView(progress, Terminal(), plain or None) as view:
            await watch_progress(client, view)
    return 0 if progress.succeeded else 1


@click.command()
@json_option
@connected
async def status(client: AsyncClient, as_json: bool) -> int:
    """Ask all services for health, versions, and what each waits for. Exit status 1 if one is not serving.

    These are the four of [addresses], and the other rollouts of the newest run.
    """
    services = await client.status()
    healthy = [service.health == "serving" for service in services]
    if as_json:
        print_json(services)
        return 0 if all(healthy) else 1
    rows = [
        (
            each.kind,
            each.address,
            Text(each.health.replace("_", " "), "green" if ok else "red"),
            each.build,
            _doing(each),
        )
        for each, ok in zip(services, healthy, strict=True)
    ]
    Terminal().print(table(("service", "address", "health", "build", "doing"), rows))
    return 0 if all(healthy) else 1


def _doing(service: ServiceStatus) -> Text:
    """Return what a service does, waits for, or fails at, in words."""
    if service.error:
        return Text(one_line(service.error), "red")
    lines = Text()
    if service.waiting_for:
        lines.append(one_line(f"waits for {', '.join(service.waiting_for)}") + "\n", "yellow")
    lines.append("\n".join(map(one_line, work_of(service))))
    lines.rstrip()
    return lines


_STYLES = {"returned": "yellow", "dead": "red", "dropped": "yellow", "committed": "green", "delivered": "green"}


@click.command()
@click.argument("group_id", metavar="GROUP_ID")
@run_option
@json_option
@targeted
@asynchronous
async def trace(target: Target, group_id: str, run_id: str | None, as_json: bool) -> int:
    """Print the history of the prompt instance GROUP_ID: leases, failures, generation, step, weights.

    From the broker, and from the run's folder if it is on this machine: of a long run the broker deletes the oldest
    histories (`broker.remembered_lives`), events and transcripts.
    """
    config = target.config()
    async with target.client() as client:
        history = await client.get_history(Handle(run_id or config.run.id, group_id))
    recorded = _recorded(config.run.path, history)
    moments = sorted([*history.moments, *recorded], key=lambda moment: moment.at)
    if as_json:
        print_json(replace(history, moments=tuple(moments)))
        return 0
    out = Terminal()
    out.print(_headline(history))
    headings = ("time (UTC)", "after", "what", "who", "detail")
    if moments:
        out.print(table(headings, _rows(moments)))
    else:
        out.print(Text("  the broker no longer has its history", "dim"))
    if history.group:
        for completion in history.group.completions:
            out.print(completion_text(completion))
    if history.traceparent:
        out.print(Text(f"OpenTelemetry trace {history.traceparent.split('-')[1]}", "dim"))
    return 0


def _headline(history: GroupHistory) -> Text:
    text = Text.assemble("group ", (one_line(history.instance_id), "bold"), f" of run {history.run_id}: ")
    text.append(history.state.replace("_", " "), _STYLES.get(history.state, "bold"))
    if history.attempt:
        text.append(f", delivered {'once' if history.attempt == 1 else f'{history.attempt} times'}")
    if history.holder:
        text.append(one_line(f", held by {history.holder}"))
    if history.step >= 0:
        text.append(f", step {history.step}")
    if history.policy_version >= 0:
        text.append(f", carried by version {history.policy_version}")
    return text


def _rows(moments: list[Moment]) -> Iterator[tuple[str | Text, ...]]:
    for before, moment in zip([moments[0], *moments], moments, strict=False):
        what = Text(moment.kind.replace("_", " "), _STYLES.get(moment.kind, ""))
        seconds = (moment.at - before.at).total_seconds()
        at = f"{moment.at.astimezone(UTC):%Y-%m-%d %H:%M:%S}.{moment.at.microsecond // 1000:03}"
        yield at, f"{seconds:+.3f} s", what, moment.who, moment.detail


def _recorded(folder: Path, history: GroupHistory) -> list[Moment]:
    """Return the moment of the group's step from the run's folder, if the broker's events lack it."""
    if history.step < 0 or history.state not in ("trained", "committed"):
        return []
    if any(moment.kind == "trained" for moment in history.moments):
        return []
    if (step := read_run(folder).steps.get(history.step)) is None:
        return []
    detail = f"step {history.step} made version {history.step + 1} (metrics.jsonl)"
    return [Moment(datetime.fromtimestamp(step.time, UTC), "trained", detail=detail)]


_PORT = 7180
_ANSWER_SECONDS = 5.0  # deadline of a call; a slower service is shown as away


@click.command()
@targeted
@run_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=_PORT, show_default=True, help="Port; 0: a free one.")
@click.option("--no-open", is_flag=True, help="Open no browser.")
@click.option("--allow-remote", is_flag=True, help="Listen where other machines reach it; the page has no login.")
@asynchronous
async def dashboard(
    target: Target,
    run_id: str | None,
    host: str,
    port: int,
    no_open: bool,
    allow_remote: bool,
) -> int:
    """Show a run on a page in the browser, live, until Ctrl-C.

    Without --run it is the run file's; without a run file the newest active run of the broker. The page also reads the
    run's metrics.jsonl if it is on this machine: it has steps that the broker has deleted, and runs that have ended.
    """
    from quartet_client.dashboard import Collector, PageServer  # reads the page's files

    config = target.config()
    chosen = run_id or (config.run.id if target.names_run else None)
    folder = config.run.folder if config.run.folder and chosen == config.run.id else None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(number, stop.set)
    async with AsyncClient.from_config(target.path, target.overrides, _ANSWER_SECONDS) as client:
        collector = Collector(client, chosen, Path(folder) if folder else None)
        with _listening(PageServer, lambda: collector.documents, host, port, allow_remote) as server:
            echo(f"dashboard at {server.address}")
            sys.stdout.flush()
            if not no_open and has_screen():
                # A browser that $BROWSER names may run until it is closed.
                threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
            await collector.run(stop)
    return 0


def _listening(server, documents, host: str, port: int, allow_remote: bool):
    """Return the server; if the default port is taken, on a free one."""
    try:
        return server(documents, host, port, allow_remote)
    except InputError as error:
        taken = getattr(error.__cause__, "errno", None) == errno.EADDRINUSE
        if not taken or click.get_current_context().get_parameter_source("port") is not ParameterSource.DEFAULT:
            raise
        return server(documents, host, 0, allow_remote)


def has_screen() -> bool:
    """Return whether a browser can be opened for a person: there is a display, and this is no CI."""
    graphical = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return graphical and not os.environ.get("CI")
