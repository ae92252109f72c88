"""`quartet eval`: an evaluation of a stored set, now."""

from pathlib import Path

import click

from quartet_client.commands.output import console, group_fields, to_json
from quartet_client.commands.target import Target, asynchronous, json_option, targeted
from quartet_client.data import load_prompts
from quartet_client.evaluations import incomplete_of


@click.command("eval")
@click.argument("run_id", metavar="RUN")
@click.argument("evaluation_set", metavar="SET")
@click.option("--prompts", "file", type=click.Path(path_type=Path), help="JSONL file to store as that set first.")
@click.option(
    "--version", "policy_version", type=int, help="Policy version to evaluate. Default: whichever is live meanwhile."
)
@click.option("--hold", is_flag=True, help="Pause the training meanwhile: all of one version.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds to wait for it.")
@json_option
@targeted
@asynchronous
async def evaluate(
    target: Target,
    run_id: str,
    evaluation_set: str,
    file: Path | None,
    policy_version: int | None,
    hold: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Evaluate the policy on SET of RUN and print accuracy and reward; with --json also every completion.

    Exit status 1 if prompts were lost: then there is no figure.
    """
    prompts = load_prompts(file, require_reference=True) if file else None
    async with target.client() as client:
        result = await client.evaluate(
            run_id,
            evaluation_set,
            prompts=prompts,
            policy_version=policy_version,
            hold=hold,
            timeout=timeout,
            summary_only=not as_json,
        )
    if as_json:
        fields = {name: getattr(result, name) for name in result.__slots__ if name != "groups"}
        click.echo(to_json({**fields, "groups": [group_fields(group) for group in result.groups]}, indent=2))
    else:
        oldest, newest = result.oldest_version, result.policy_version
        versions = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        if result.accuracy is None or result.reward is None:
            told = f"{incomplete_of(result.finished, result.prompts)}; see quartet dead list {run_id}"
        else:
            told = f"accuracy {result.accuracy:.1%}, reward {result.reward:.3f} over {result.prompts} prompts"
        console().print(f"{result.evaluation_set} at {versions}: {told}", markup=False, highlight=False)
    return 0 if result.accuracy is not None else 1
