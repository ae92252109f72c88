"""`quartet top`: services, rates, queues and staleness at one look, again and again."""

import asyncio
from contextlib import suppress
from typing import Any

import click
import grpc
from quartet.v1 import trainer_pb2
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quartet_client.async_client import AsyncClient
from quartet_client.commands.output import console, print_json
from quartet_client.commands.status import doing
from quartet_client.commands.target import Target, asynchronous, json_option, run_option, targeted
from quartet_client.errors import QuartetError
from quartet_client.runs import Run, ServiceStatus

_PATIENCE = 3.0  # seconds for each question
_QUEUES = ("queued", "leased", "ready", "leased_to_trainer", "trained", "committed", "stale", "dead", "redelivered")
_METRICS = {
    "staleness": "staleness/mean",
    "most stale": "staleness/max",
    "seconds a step": "time/step",
    "trained tokens/s": "throughput/tokens_per_second",
    "trainer idle": "time/idle_fraction",
    "rollouts idle": "rollouts/idle_fraction",
    "reward": "reward/mean",
}


@click.command()
@run_option
@click.option("--once", is_flag=True, help="Look once, print it, and stop.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between looks."
)
@json_option
@targeted
@asynchronous
async def top(target: Target, run_id: str | None, once: bool, interval: float, as_json: bool) -> int:
    """Show services, rates, queue depths, staleness and idle fractions, until Ctrl-C.

    With --once, or --json, it looks once; exit status 1 if a service cannot be reached or does not serve.
    """
    run_id = run_id or target.config().run.id
    async with target.client() as client:
        if once or as_json:
            look = await _look(client, run_id)
            print_json(_fields(look)) if as_json else console().print(_picture(look))
            return 0 if all(service.health == "serving" for service in look["services"]) else 1
        with Live(console=console(), auto_refresh=False, screen=console().is_terminal) as live:
            while True:
                live.update(_picture(await _look(client, run_id)), refresh=True)
                await asyncio.sleep(interval)


async def _look(client: AsyncClient, run_id: str) -> dict[str, Any]:
    services, run, metrics = await asyncio.gather(client.status(), _run(client, run_id), _last_step(client))
    return {"run_id": run_id, "services": services, "run": run, "step": metrics[0], "metrics": metrics[1]}


async def _run(client: AsyncClient, run_id: str) -> Run | None:
    with suppress(QuartetError):  # the broker's own row says what is wrong; a run that is not there is shown as none
        async with asyncio.timeout(_PATIENCE):
            return await client.run(run_id)
    return None


async def _last_step(client: AsyncClient) -> tuple[int, dict[str, float]]:
    """Return the last step the trainer has done, and its metrics; -1 and none if it cannot say."""
    status = trainer_pb2.TrainerServiceGetStatusRequest()
    try:
        done = (await client.connections.call("trainer", "GetStatus", status, timeout=_PATIENCE)).step
        if done < 1:
            return -1, {}
        stub = await client.connections.stub("trainer")
        async with client.connections.errors("trainer"):
            call = stub.WatchMetrics(trainer_pb2.WatchMetricsRequest(after_step=done - 2), timeout=_PATIENCE)
            answer = await call.read()
            call.cancel()
    except QuartetError:
        return -1, {}
    if answer is grpc.aio.EOF:
        return -1, {}
    return answer.step, dict(answer.metrics)


def _fields(look: dict[str, Any]) -> dict[str, Any]:
    run: Run | None = look["run"]
    return {
        "run_id": look["run_id"],
        "state": run.state if run else "unknown",
        "policy_version": run.policy_version if run else -1,
        "queues": {name: getattr(run.stats, name) for name in run.stats.__slots__} if run else {},
        "members": run.members if run else (),
        "step": look["step"],
        "metrics": look["metrics"],
        "services": look["services"],
    }


def _picture(look: dict[str, Any]) -> RenderableType:
    run: Run | None = look["run"]
    state = f"{run.state}, policy version {run.policy_version}" if run else "not known to the broker"
    parts: list[RenderableType] = [Text.assemble("run ", (look["run_id"], "bold"), f": {state}"), _services(look)]
    if run and run.members:
        parts += [Text(), _members(run)]
    if run:
        counts = Text("\nqueues  ")
        for name in _QUEUES:
            counts.append(f"{name.replace('_', ' ')} ", "dim").append(f"{getattr(run.stats, name)}  ")
        parts.append(counts)
    if look["metrics"]:
        told = Text(f"step {look['step']}  ")
        for name, metric in _METRICS.items():
            if (value := look["metrics"].get(metric)) is not None:
                shown = f"{value:.0%}" if name.endswith("idle") else f"{value:,.4g}"
                told.append(f"{name} ", "dim").append(f"{shown}  ")
        parts.append(told)
    return Group(*parts)


def _services(look: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for heading in ("service", "address", "health"):
        table.add_column(heading, no_wrap=True)
    table.add_column("doing", ratio=1)
    services: list[ServiceStatus] = look["services"]
    for service in services:
        style = "green" if service.health == "serving" else "red"
        health = Text(service.health.replace("_", " "), style)
        table.add_row(service.kind, service.address, health, doing(service))
    return table


def _members(run: Run) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in (
        "member",
        "state",
        "version",
        "behind",
        "generated tokens/s",
        "running",
        "waiting",
        "KV cache",
        "idle",
    ):
        table.add_column(heading, justify="left" if heading in ("member", "state") else "right")
    for member in run.members:
        gauges = member.gauges
        behind = run.policy_version - member.policy_version if member.policy_version >= 0 else None
        table.add_row(
            member.instance_id,
            f"{member.state}, waits for {member.waiting_for}" if member.waiting_for else member.state,
            str(member.policy_version) if member.policy_version >= 0 else "none",
            "" if behind is None else str(max(0, behind)),
            *(_gauge(gauges, name, form) for name, form in _GAUGES.items()),
        )
    return table


_GAUGES = {
    "tokens_per_second": ",.0f",
    "running": ".0f",
    "waiting": ".0f",
    "kv_cache_use": ".0%",
    "idle_fraction": ".0%",
}


def _gauge(gauges: Any, name: str, form: str) -> str:
    return format(gauges[name], form) if name in gauges else ""
