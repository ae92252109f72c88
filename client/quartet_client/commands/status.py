"""`quartet status`: how the services are."""

from typing import Any

import click
from rich.table import Table
from rich.text import Text

from quartet_client.cli.options import Target, asynchronous, json_option, targeted
from quartet_client.cli.output import console, print_json
from quartet_client.runs import ServiceStatus
from quartet_common.text import one_line


@click.command()
@json_option
@targeted
@asynchronous
async def status(target: Target, as_json: bool) -> int:
    """Ask all services for health, versions, and what each waits for. Exit status 1 if one cannot be reached.

    These are the four of [addresses], and the other rollouts of the newest run.
    """
    async with target.client() as client:
        services = await client.status()
    if as_json:
        print_json(services)
    else:
        console().print(_table(services))
    return 0 if all(service.health == "serving" for service in services) else 1


def _table(services: list[ServiceStatus]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for heading in ("service", "address", "health", "build"):
        table.add_column(heading, no_wrap=True)
    table.add_column("doing", ratio=1)
    for service in services:
        style = "green" if service.health == "serving" else "red"
        health = Text(service.health.replace("_", " "), style)
        table.add_row(service.kind, service.address, health, service.build, doing(service))
    return table


def doing(service: ServiceStatus) -> Text:
    """Return what a service does, waits for, or fails at, in words."""
    if service.error:
        return Text(one_line(service.error), "red")
    lines = Text()
    if service.waiting_for:
        lines.append(one_line(f"waits for {', '.join(service.waiting_for)}") + "\n", "yellow")
    error = service.details.get("error")  # it answers, but cannot say: the broker without Redis
    told = [str(error)] if error else _DETAILS[service.kind](service.details)
    lines.append("\n".join(map(one_line, told)))
    lines.rstrip()
    return lines


def _broker(details: Any) -> list[str]:
    lines = []
    for run in details["runs"]:
        counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in run["stats"].items() if count)
        lines.append(f"run {run['run_id']} {run['state']}, version {run['policy_version']}: {counts or 'nothing yet'}")
    return lines or ["no runs"]


def _reward(details: Any) -> list[str]:
    return [f"verifiers {', '.join(details['verifiers'])}"]


def _rollout(details: Any) -> list[str]:
    version = int(details["policy_version"])
    return [
        f"run {details['run_id'] or 'none'}, engine {details['engine']}, "
        f"{f'version {version}' if version >= 0 else 'no weights yet'}, "
        f"{details['running']} running, {details['waiting']} waiting, "
        f"{details['tokens_per_second']:,.0f} generated tokens/s"
        + (", paused for a weight update" if details["paused"] else "")
    ]


def _trainer(details: Any) -> list[str]:
    phase = details["phase"].removeprefix("TRAINER_PHASE_").lower().replace("_", " ")
    return [
        f"run {details['run_id'] or 'none'}, {details['algorithm']} by {details['plugin']} on {details['world_size']} "
        f"rank(s), {phase}, step {details['step']}, published {details['published_version']}, "
        f"checkpoint {details['checkpoint_step']}"
    ]


_DETAILS = {"broker": _broker, "reward": _reward, "rollout": _rollout, "trainer": _trainer}
