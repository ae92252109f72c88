"""`quartet submit`: prompts to a run, and their completions back."""

from pathlib import Path

import click

from quartet_client.cli.options import Target, asynchronous, json_option, run_option, targeted
from quartet_client.cli.output import console, group_fields, print_json, show_group
from quartet_client.data import load_prompts
from quartet_client.terminal import echo


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@run_option
@click.option("--purpose", type=click.Choice(["serve", "train", "evaluate"]), default="serve", show_default=True)
@click.option("--evaluation-set", default="", help="With --purpose evaluate: the set the prompts are stored in.")
@click.option("--prefix", default="", help="Instance ids PREFIX/0, PREFIX/1, …: submitting again doubles nothing.")
@click.option("--wait", is_flag=True, help="Wait for the completions and print each group as it is finished.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds to wait in vain.")
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
    out, failed = console(), False
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
