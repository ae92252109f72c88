"""`quartet submit` and `generate`: prompts and completions."""

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
from quartet_client.models import completion_fields, group_fields
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
    prompts = load_prompts(file, key="FILE")
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
