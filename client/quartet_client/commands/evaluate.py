"""`quartet eval`: an evaluation now, of a run's policy or of a checkpoint."""

import asyncio
from pathlib import Path

import click

from quartet_client.cli.options import Target, json_option, targeted, the_launcher
from quartet_client.cli.output import console, group_fields, print_json
from quartet_client.data import load_prompts
from quartet_client.evaluations import accuracy_text, incomplete_of
from quartet_client.runs import Evaluation


@click.command("eval")
@click.argument("run", metavar="RUN")
@click.argument("evaluation_set", metavar="SET")
@click.option("--prompts", "file", type=click.Path(path_type=Path), help="JSONL file to store as that set first.")
@click.option(
    "--version", "policy_version", type=int, help="Policy version to evaluate. Default: whichever is live meanwhile."
)
@click.option("--hold", is_flag=True, help="Pause the training meanwhile: all of one version.")
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

    Exit status 1 if prompts were lost: then there is no figure.
    """
    if checkpoint is None:
        result = asyncio.run(_evaluate(target, run, evaluation_set, file, policy_version, hold, timeout, not as_json))
        return _show(result, as_json, f"; see quartet dead list {run}")
    if policy_version is not None or hold or target.path is not None:
        raise click.UsageError("--checkpoint goes with a run file as RUN, and without --version, --hold and --config")
    with the_launcher("evaluate a run whose services are there"):
        from quartet_local.evaluation import evaluate as evaluate_here

    def show(result: Evaluation) -> int:
        return _show(result, as_json)

    return evaluate_here(Path(run), evaluation_set, checkpoint, show, file, target.overrides, timeout, not as_json)


async def _evaluate(
    target: Target,
    run_id: str,
    evaluation_set: str,
    file: Path | None,
    policy_version: int | None,
    hold: bool,
    timeout: float,
    summary_only: bool,
) -> Evaluation:
    prompts = load_prompts(file, require_reference=True) if file else None
    async with target.client() as client:
        return await client.evaluate(
            run_id,
            evaluation_set,
            prompts=prompts,
            policy_version=policy_version,
            hold=hold,
            timeout=timeout,
            summary_only=summary_only,
        )


def _show(result: Evaluation, as_json: bool, more: str = "") -> int:
    """Print it and return the exit status; `more`: where to read why prompts were lost."""
    if as_json:
        fields = {name: getattr(result, name) for name in result.__slots__ if name != "groups"}
        print_json({**fields, "groups": [group_fields(group) for group in result.groups]})
    else:
        oldest, newest = result.oldest_version, result.policy_version
        versions = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        if result.reward is None:
            told = f"{incomplete_of(result.finished, result.prompts)}{more}"
        else:
            accuracy = accuracy_text(result.accuracy, result.interval, result.judged)
            told = f"accuracy {accuracy}, reward {result.reward:.3f} over {result.prompts} prompts"
        console().print(f"{result.evaluation_set} at {versions}: {told}", soft_wrap=True)
    return 0 if result.reward is not None else 1
