"""`quartet submit`, `generate` and `eval`: prompts and completions."""

import asyncio
from pathlib import Path
from typing import Any

import click

from quartet_client.async_client import AsyncClient
from quartet_client.cli.options import (
    Target,
    asynchronous,
    completion_text,
    connected,
    json_option,
    print_json,
    run_option,
    show_group,
    targeted,
)
from quartet_client.data import load_prompts
from quartet_client.launcher import the_launcher
from quartet_client.models import Evaluation, completion_fields, group_fields
from quartet_client.progress import accuracy_text, incomplete_of, reward_text
from quartet_client.terminal import Terminal, echo


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@run_option
@click.option(
    "--purpose",
    type=click.Choice(["serve", "train", "evaluate"]),
    default="serve",
    show_default=True,
    help="serve: answer, do not train; train; evaluate: store in a set.",
)
@click.option("--evaluation-set", default="", help="With --purpose evaluate: the set the prompts are stored in.")
@click.option("--prefix", default="", help="Instance ids PREFIX/0, PREFIX/1, …: submitting again adds no duplicates.")
@click.option("--wait", is_flag=True, help="Wait for the completions and print each group as it is finished.")
@click.option(
    "--timeout",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds to wait for room in the queue, then for each next result.",
)
@json_option
@targeted
@asynchronous
async def submit(
    target: Target,
    file: Path,
    run_id: str | None,
    purpose: str,
    evaluation_set: str,
    prefix: str,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Submit the prompts of FILE (JSONL; - for standard input) to a run.

    Without --wait the instance ids are printed, one a line. With it, completions and rewards: JSON lines where the
    output is no terminal or --json is given.
    """
    if purpose == "evaluate" and not evaluation_set:
        raise click.UsageError("--purpose evaluate needs --evaluation-set NAME")
    if wait and purpose == "evaluate":
        raise click.UsageError("--wait is for --purpose serve and train; use `quartet eval` for evaluation sets")
    prompts = load_prompts(file)
    run_id = run_id or target.config().run.id
    ids = [f"{prefix}/{index}" for index in range(len(prompts))] if prefix else None
    out, failed = Terminal(), False
    async with target.client() as client:
        handles = await client.submit(
            run_id, prompts, purpose=purpose, evaluation_set=evaluation_set, instance_ids=ids, timeout=timeout
        )
        if not wait:
            for handle in handles:
                echo(handle.instance_id)
            return 0
        async for group in client.results(handles, timeout):
            failed = failed or group.dead is not None
            if as_json or not out.is_terminal:
                print_json(group_fields(group), indent=None)
            else:
                show_group(out, group)
    return 1 if failed else 0


@click.command()
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send PROMPT as a user's message, rendered with the model's chat template.")
@click.option("-n", "n", type=int, help="Number of completions.")
@click.option("--temperature", type=float, help="Softmax temperature; 0 is greedy.")
@click.option("--max-new-tokens", type=int, help="Most tokens of a completion.")
@click.option("--seed", type=int, help="Seed of the sampling.")
@click.option("--rollout", "address", metavar="HOST:PORT", help="Address of the rollout.")
@json_option
@connected
async def generate(
    client: AsyncClient, prompt: str, chat: bool, address: str | None, as_json: bool, **given: Any
) -> int:
    """Complete PROMPT with the weights the rollout has now. Nothing is scored, stored or trained."""
    fields: dict[str, Any] = {"messages": {"role": "user", "content": prompt}} if chat else {"prompt": prompt}
    sampling = {name: value for name, value in given.items() if value is not None}
    if sampling:
        fields["sampling"] = sampling
    out = Terminal()
    for completion in await client.generate(fields, address=address):
        if as_json:
            print_json(completion_fields(completion), indent=None)
        else:
            out.print(completion_text(completion))
    return 0


@click.command("eval")
@click.argument("run", metavar="RUN")
@click.argument("evaluation_set", metavar="SET")
@click.option("--prompts", "file", type=click.Path(path_type=Path), help="JSONL file to store as that set first.")
@click.option(
    "--version", "policy_version", type=int, help="Policy version to evaluate. Default: the live one, which may change."
)
@click.option("--hold", is_flag=True, help="Pause the training meanwhile, so that all is of one version.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Folder of a checkpoint or model to evaluate without a run; RUN is then the run file.",
)
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds to wait for it.")
@json_option
@targeted
def evaluate(
    target: Target,
    run: str,
    evaluation_set: str,
    file: Path | None,
    policy_version: int | None,
    hold: bool,
    checkpoint: Path | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Evaluate the policy on SET of RUN and print accuracy and reward; with --json also every completion.

    With --checkpoint RUN is a run file: broker, reward service and rollout are started for it on this machine, on ports
    of their own, evaluate the checkpoint on a set of [data.evaluation] or on --prompts, and are stopped.

    Exit status 1 if prompts died: then there is no accuracy.
    """
    if checkpoint is None:

        async def evaluated() -> Evaluation:
            prompts = load_prompts(file, require_reference=True) if file else None
            options = {"policy_version": policy_version, "hold": hold, "timeout": timeout, "summary_only": not as_json}
            async with target.client() as client:
                return await client.evaluate(run, evaluation_set, prompts=prompts, **options)  # type: ignore[arg-type]

        return _show(asyncio.run(evaluated()), as_json, f"; see quartet dead list {run}")
    if policy_version is not None or hold or target.path is not None:
        raise click.UsageError("--checkpoint goes with a run file as RUN, and without --version, --hold and --config")
    launcher = the_launcher("evaluate a run whose services are there")

    def show(result: Evaluation) -> int:
        return _show(result, as_json)

    return launcher.evaluate(Path(run), evaluation_set, checkpoint, show, file, target.overrides, timeout, not as_json)


def _show(result: Evaluation, as_json: bool, more: str = "") -> int:
    """Print it and return the exit status; `more`: where to read why prompts died."""
    if as_json:
        fields = {name: getattr(result, name) for name in result.__slots__ if name != "groups"}
        print_json({**fields, "groups": [group_fields(group) for group in result.groups]})
    else:
        oldest, newest = result.oldest_version, result.policy_version
        versions = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        if result.reward is None:
            summary = f"{incomplete_of(result.finished, result.prompts)}{more}"
        else:
            summary = f"accuracy {accuracy_text(result)}, reward {reward_text(result)} over {result.prompts} prompts"
        Terminal().print(f"{result.evaluation_set} at {versions}: {summary}", soft_wrap=True)
    return 0 if result.reward is not None else 1
