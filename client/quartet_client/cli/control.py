"""`quartet pause`, `resume`, `checkpoint`, `stop`, `drain` and `rollback`: what an operator does to a run at work."""

import functools
import json
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click

from quartet_client.async_client import AsyncClient
from quartet_client.audit import checkpoint_folder
from quartet_client.cli.options import Target, asynchronous, connected, json_option, print_json, targeted
from quartet_client.control import trainer_status
from quartet_client.errors import InputError, QuartetError
from quartet_client.launcher import the_launcher
from quartet_client.terminal import echo
from quartet_common.errors import AWAY

_reason = click.option("--reason", default="asked by the quartet command", help="Why, for the service's log.")
_timeout = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for it.",
)


def _of_trainer(command: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., Any]:
    """Give a command a client and a run: RUN or the run file's, which the trainer must train; else the trainer's."""

    @click.argument("run_id", metavar="[RUN]", required=False)
    @json_option
    @targeted
    @asynchronous
    @functools.wraps(command)
    async def wrapped(target: Target, run_id: str | None, **options: Any) -> int:
        named = target.path is not None or any(each.startswith("run.id") for each in target.overrides)
        wanted = run_id or (target.config().run.id if named else "")
        seconds = min(30.0, options.get("timeout", 30.0))  # also of the first call, to a service that may hang
        async with AsyncClient.from_config(target.path, target.overrides, seconds) as client:
            return await command(client, (await trainer_status(client.connections, wanted)).run_id, **options)

    return wrapped


def _say(as_json: bool, sentence: str, **facts: Any) -> int:
    print_json(facts, indent=None) if as_json else echo(sentence)
    return 0


@click.command()
@click.option("--limit", type=click.FloatRange(min=0), default=0, help="Seconds after which the pause ends by itself.")
@_reason
@_timeout
@_of_trainer
async def pause(client: AsyncClient, run_id: str, limit: float, reason: str, timeout: float, as_json: bool) -> int:
    """Pause the training of RUN after the step in progress. The pause ends with the trainer's process, too."""
    step = await client.pause(run_id, limit=limit, reason=reason, timeout=timeout)
    latest = f", or by itself after {limit:g} s" if limit else ""
    return _say(
        as_json,
        f"run {run_id} is paused after {step} steps; it goes on with: quartet resume {run_id}{latest}",
        run_id=run_id,
        step=step,
    )


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
    return _say(
        as_json,
        f"run {run_id}: the checkpoint of {saved.step} steps is durable: {saved.path}",
        run_id=run_id,
        step=saved.step,
        path=saved.path,
    )


@click.command()
@_reason
@_timeout
@_of_trainer
async def stop(client: AsyncClient, run_id: str, reason: str, timeout: float, as_json: bool) -> int:
    """Stop the trainer of RUN after the step in progress, with a checkpoint. The run stays active.

    What keeps the trainer up may start it again: quartet run does, systemd does not.
    """
    step = await client.stop(run_id, reason=reason, timeout=timeout)
    return _say(
        as_json,
        f"the trainer of run {run_id} has stopped; {step} steps are committed, and it goes on there when it is started",
        run_id=run_id,
        committed_step=step,
    )


@click.command()
@click.argument("rollout")
@click.option("--undo", is_flag=True, help="Let the rollout, given by its address, work again.")
@click.option(
    "--grace",
    type=click.FloatRange(0, 86400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long groups may take that have begun; the prompts of others are given back.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the answer, after the grace.",
)
@_reason
@json_option
@connected
async def drain(
    client: AsyncClient, rollout: str, undo: bool, grace: float, timeout: float, reason: str, as_json: bool
) -> int:
    """Take ROLLOUT out of its run: it takes no more prompts, finishes or gives back what it has, and leaves.

    ROLLOUT is an address, or the name of a member of an active run. Its process stays, and joins again with --undo.
    """
    done = await client.drain(rollout, grace=grace, undo=undo, reason=reason, timeout=timeout)
    if undo:
        sentence = f"the rollout at {done.address} works again{f' for run {done.run_id}' if done.run_id else ''}"
    else:
        left = f"has left run {done.run_id}" if done.run_id else "was in no run"
        sentence = (
            f"the rollout at {done.address} {left}: {done.finished} groups finished, {done.given_back} prompts given "
            f"back; it works again with: quartet drain {done.address} --undo"
        )
    return _say(
        as_json,
        sentence,
        address=done.address,
        run_id=done.run_id,
        finished=done.finished,
        given_back=done.given_back,
    )


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--to", type=click.IntRange(min=0), required=True, metavar="STEP", help="Step of the checkpoint.")
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The trainer's checkpoints. Default: those of the run file, or runs/RUN/checkpoints.",
)
@json_option
@targeted
@asynchronous
async def rollback(target: Target, run_id: str, to: int, checkpoints: Path | None, as_json: bool) -> int:
    """Go back to the weights and the optimizer of RUN's checkpoint of STEP, while its trainer is stopped.

    Run it on the trainer's host. What was trained since stays settled, and is not trained again. A new checkpoint is
    written, with a step number that no weights had, from which the trainer goes on. If the broker is away, the settings
    are those of the run file.
    """
    python = the_launcher("make a checkout's environments on this host").service_python("trainer")
    if not python.exists():
        raise QuartetError(
            f"the trainer's environment is not made: '{python}' is missing; make it: "
            "python3 deploy/local/environments.py trainer"
        )
    root = checkpoints or checkpoint_folder(target.path, target.overrides, run_id)
    max_staleness, max_steps = await _settings(target, run_id)
    words = [str(python), "-m", "quartet_trainer.rollback", str(root), run_id, "--to", str(to)]
    words += ["--max-staleness", str(max_staleness)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the trainer's part ended with status {done.returncode}"]
        raise InputError("; ".join(lines) if done.returncode == 2 else lines[-1])
    made = json.loads(done.stdout)
    sentence = f"run {run_id} goes on at step {made['step']} with the weights of step {to}: {made['path']}; start it"
    if 0 < max_steps <= made["step"]:
        sentence += f" with a higher run.max_steps than {max_steps}, where it would end"
    return _say(as_json, sentence, run_id=run_id, to=to, **made)


async def _settings(target: Target, run_id: str) -> tuple[int, int]:
    """Return max_staleness and max_steps of a run that no trainer trains. Raises QuartetError if one does."""
    async with AsyncClient.from_config(target.path, target.overrides, timeout=5.0) as client:
        try:
            run = await client.get_run(run_id)
        except QuartetError as error:
            if error.code not in AWAY:
                raise
            section = target.config().run
            return section.max_staleness, section.max_steps
    for member in run.members:
        if member.kind == "trainer":
            raise QuartetError(
                f"the trainer {member.instance_id} is a member of run '{run_id}'; stop it: quartet stop {run_id} (one "
                "that was killed is forgotten after run.member_ttl)"
            )
    return run.spec.max_staleness, run.spec.max_steps
