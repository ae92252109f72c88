"""`quartet pause`, `resume`, `checkpoint`, `stop`, `drain` and `rollback`: what an operator does to a run at work."""

import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click

from quartet_client.async_client import AsyncClient
from quartet_client.audit import checkpoint_folder
from quartet_client.cli.backup import config_option, overrides_option
from quartet_client.cli.options import (
    Target,
    asynchronous,
    checkpoints_option,
    connected,
    json_option,
    print_json,
    targeted,
)
from quartet_client.control import trainer_status
from quartet_client.launcher import run_in_environment
from quartet_client.terminal import echo


def _seconds(option: str, default: float, what: str) -> Callable[..., Any]:
    kind = click.FloatRange(min=0)
    return click.option(option, type=kind, default=default, show_default=True, metavar="SECONDS", help=what)


_timeout = _seconds("--timeout", 600, "How long to wait for it.")


def _of_trainer(command: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., Any]:
    """Give a command a client and a run: RUN or the run file's, which the trainer must train; else the trainer's."""

    @click.argument("run_id", metavar="[RUN]", required=False)
    @json_option
    @targeted
    @asynchronous
    @functools.wraps(command)
    async def wrapped(target: Target, run_id: str | None, **options: Any) -> int:
        wanted = run_id or (target.config().run.id if target.names_run else "")
        seconds = min(30.0, options.get("timeout", 30.0))  # also of the first call, to a service that may hang
        async with AsyncClient.from_config(target.path, target.overrides, seconds) as client:
            return await command(client, (await trainer_status(client.connections, wanted)).run_id, **options)

    return wrapped


def _say(as_json: bool, sentence: str, **facts: Any) -> int:
    print_json(facts, indent=None) if as_json else echo(sentence)
    return 0


@click.command()
@_seconds("--limit", 0, "When the pause ends by itself; 0: never.")
@_timeout
@_of_trainer
async def pause(client: AsyncClient, run_id: str, limit: float, timeout: float, as_json: bool) -> int:
    """Pause the training of RUN after the step in progress. The pause ends with the trainer's process, too."""
    step = await client.pause(run_id, limit=limit, reason="quartet pause", timeout=timeout)
    said = f"run {run_id} is paused after {step} steps; it goes on with: quartet resume {run_id}"
    said += f", or by itself after {limit:g} s" if limit else ""
    return _say(as_json, said, run_id=run_id, step=step)


@click.command()
@_of_trainer
async def resume(client: AsyncClient, run_id: str, as_json: bool) -> int:
    """End a pause of RUN."""
    step = await client.resume(run_id)
    return _say(as_json, f"run {run_id} goes on after {step} steps", run_id=run_id, step=step)


@click.command()
@_timeout
@_of_trainer
async def checkpoint(client: AsyncClient, run_id: str, timeout: float, as_json: bool) -> int:
    """Save a checkpoint of RUN after the step in progress."""
    saved = await client.checkpoint(run_id, timeout)
    said = f"run {run_id}: the checkpoint of {saved.step} steps is durable: {saved.path}"
    return _say(as_json, said, run_id=run_id, step=saved.step, path=saved.path)


@click.command()
@_timeout
@_of_trainer
async def stop(client: AsyncClient, run_id: str, timeout: float, as_json: bool) -> int:
    """Stop the trainer of RUN after the step in progress, with a checkpoint. The run stays active.

    What keeps the trainer up may start it again: quartet run does, systemd does not.
    """
    step = await client.stop(run_id, reason="quartet stop", timeout=timeout)
    said = (
        f"the trainer of run {run_id} has stopped; {step} steps are committed, and it goes on there when it is started"
    )
    return _say(as_json, said, run_id=run_id, committed_step=step)


@click.command()
@click.argument("rollout")
@click.option("--undo", is_flag=True, help="Let the rollout, given by its address, work again.")
@_seconds("--grace", 60, "How long groups may take that have begun; the prompts of others are given back.")
@_seconds("--timeout", 30, "How long to wait for the answer, after the grace.")
@json_option
@connected
async def drain(client: AsyncClient, rollout: str, undo: bool, grace: float, timeout: float, as_json: bool) -> int:
    """Take ROLLOUT out of its run: it takes no more prompts, finishes or gives back what it has, and leaves.

    ROLLOUT is an address, or the name of a member of an active run. Its process stays, and joins again with --undo.
    """
    done = await client.drain(rollout, grace=grace, undo=undo, timeout=timeout)
    said = f"the rollout at {done.address} works again for run {done.run_id or '(none yet)'}"
    if not undo:
        left = f"has left run {done.run_id}" if done.run_id else "was in no run"
        said = (
            f"the rollout at {done.address} {left}: {done.finished} groups finished, {done.given_back} prompts given "
            f"back; it works again with: quartet drain {done.address} --undo"
        )
    return _say(as_json, said, rollout=done)


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--to", type=click.IntRange(min=0), required=True, metavar="STEP", help="Step of the checkpoint.")
@checkpoints_option
@config_option
@overrides_option
@json_option
def rollback(
    run_id: str, to: int, checkpoints: Path | None, path: Path | None, overrides: tuple[str, ...], as_json: bool
) -> int:
    """Go back to the weights and the optimizer of RUN's checkpoint of STEP, while its trainer is stopped.

    Run it on the trainer's host. What was trained since stays settled, and is not trained again. A new checkpoint is
    written, with a step number that no weights had, from which the trainer goes on.
    """
    root = checkpoints or checkpoint_folder(path, overrides, run_id)
    made = run_in_environment("trainer", "quartet_trainer.rollback", str(root), run_id, str(to))
    said = f"run {run_id} goes on at step {made['step']} with the weights of step {to}: {made['path']}; start it"
    return _say(as_json, said, run_id=run_id, to=to, **made)
