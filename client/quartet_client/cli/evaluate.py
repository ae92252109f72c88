"""`quartet eval`: a set of a run, or sets answered by a model without a run."""

import asyncio
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from quartet_client.async_client import AsyncClient
from quartet_client.cli.export import find_model
from quartet_client.cli.options import Target, json_option, print_json, table, targeted
from quartet_client.data import lacks_chat_template, load_prompts
from quartet_client.errors import InputError
from quartet_client.evaluation import SetResult, read_sets
from quartet_client.launcher import the_launcher
from quartet_client.models import Evaluation, group_fields
from quartet_client.progress import accuracy_text, incomplete_of, reward_text
from quartet_client.terminal import Terminal, echo
from quartet_common.hub import is_hub_id
from quartet_common.text import visible

_OF_A_RUN = ("--prompts", "--version", "--hold")
_OF_A_MODEL = ("-k", "--temperature", "--max-tokens", "--verifier", "--limit", "--engine", "--out", "--attach")
_OF_MODEL_SECTION = {"revision", "tokenizer", "chat_template", "template_arguments"}
_FAILURES_SHOWN = 3


@click.command("eval")
@click.argument("what", metavar="MODEL|RUN")
@click.argument("sets", metavar="SET...", nargs=-1, required=True)
@click.option("-k", type=click.IntRange(1, 1024), help="Completions of each problem. Default: the set's, or 1.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Default: the set's, or 0, which is greedy.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of a completion. Default: the set's.")
@click.option("--verifier", multiple=True, help="A verifier instead of the set's; may be repeated.")
@click.option("--limit", type=click.IntRange(min=1), help="Problems of each set, from its first. Default: all.")
@click.option("--engine", type=click.Choice(["vllm", "transformers"]), help="Default: vllm, or the run file's.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the answers. Default: evaluations/MODEL.")
@click.option(
    "--attach",
    is_flag=True,
    default=None,
    help="MODEL is a run at the broker, whose rollouts answer with their weights.",
)
@click.option("--prompts", type=click.Path(path_type=Path), help="JSONL file to store as SET of RUN first.")
@click.option("--version", type=int, help="Policy version of RUN. Default: the live one, which may change.")
@click.option(
    "--hold", is_flag=True, default=None, help="Pause the training of RUN meanwhile, so that all is of one version."
)
@click.option(
    "--timeout", type=float, default=600.0, show_default=True, help="Seconds: for RUN, or of MODEL without a result."
)
@json_option
@targeted
def evaluate(target: Target, what: str, sets: tuple[str, ...], timeout: float, as_json: bool, **given: Any) -> int:
    """Answer each SET with MODEL, and print avg@k, pass@k and maj@k with 95% intervals.

    MODEL is the folder of a model or checkpoint, with a slash, such as ./model, or ORG/NAME of the hub. SET is a pack
    (gsm8k, math-500, aime24, aime25, humaneval, mbpp, livecodebench), PACK=FILE with its rows, a file,
    FILE.py:FUNCTION, or a set of the run file of --config. Services are started for it, and stopped. All completions
    are in the folder --out, and the same command goes on there.

    Without a slash it is RUN, a run at the broker, whose stored SET its rollouts evaluate.

    Exit status 1 if problems have no answer or no score: they are in no figure.
    """
    of_a_model = bool(given["attach"] or "/" in what or (Path(what) / "config.json").is_file())
    for option in _OF_A_RUN if of_a_model else _OF_A_MODEL:
        if given[option.strip("-").replace("-", "_")] not in (None, ()):
            other = "RUN" if of_a_model else "MODEL"
            raise click.UsageError(f"{option} goes with {other}; got {what}{_SLASH}")
    if what.endswith(".toml"):
        raise click.UsageError(
            f"got a run file; allowed: MODEL with --config {what}, such as a checkpoint's folder, or RUN"
        )
    if of_a_model:
        return _of_model(target, what, sets, timeout, as_json, **given)
    if len(sets) > 1:
        raise click.UsageError(f"one SET of a run is evaluated; got {len(sets)}{_SLASH}")
    result = asyncio.run(_of_run(target, what, sets[0], timeout, as_json, **given))
    return _show(result, as_json, f"; see quartet dead list {what}")


_SLASH = "; a MODEL has a slash, such as ./FOLDER or ORG/NAME, and a RUN none"


def _of_model(target: Target, what: str, words: tuple[str, ...], timeout: float, as_json: bool, **given: Any) -> int:
    if given["attach"] and given["engine"]:
        raise click.UsageError("--engine goes without --attach: the rollouts of the run have theirs")
    asked = {"n": given["k"], "temperature": given["temperature"], "max_new_tokens": given["max_tokens"]}
    sampling = {key: value for key, value in asked.items() if value is not None}
    sets = read_sets(words, target.config(), sampling, given["verifier"], given["limit"])
    out = given["out"] or Path("evaluations") / re.sub(r"[^\w.-]+", "-", what).strip("-.")

    async def work(client: AsyncClient, run_id: str, model: dict[str, Any]) -> int:
        results = {name: SetResult(name, prompts, model, out) for name, prompts in sets.items()}
        out.mkdir(parents=True, exist_ok=True)
        for name, prompts in sets.items():
            await results[name].answer(client, run_id, prompts, model, partial(echo, err=True), timeout)
        return _report(results, model, out, as_json)

    if given["attach"]:

        async def attached() -> int:
            async with target.client() as client:
                version = (await client.get_run(what)).policy_version
                return await work(client, what, {"run": what, "policy_version": version})

        return asyncio.run(attached())
    path, version, settings = Path(what), 0, target.config().model
    model = {"path": what, **settings.model_dump(mode="json", include=_OF_MODEL_SECTION, exclude_defaults=True)}
    if not is_hub_id(path):
        path, version = find_model(path, "MODEL")
        chats = any(prompt.messages for prompts in sets.values() for prompt in prompts)
        if chats and not settings.overrides_tokenizer and lacks_chat_template(path):
            raise InputError(
                f"MODEL: '{what}' has no chat template, and there are chats; allowed: rows with a \"prompt\", or "
                "--set model.chat_template=FILE"
            )
        stats = {file.name: file.stat() for file in sorted(path.glob("*.safetensors"))}
        weights = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        model |= {"path": str(path.resolve()), "version": version, "weights": weights}
    for name, prompts in sets.items():
        SetResult(name, prompts, model, out)  # refuses other answers before services are started
    every = [prompt for prompts in sets.values() for prompt in prompts]
    longest = max(prompt.sampling.max_new_tokens for prompt in every if prompt.sampling)
    verifiers = list(dict.fromkeys(str(one.file or one.name) for prompt in every for one in prompt.verifiers))
    own = [f"run.sampling.max_new_tokens={longest}", f"run.verifiers={json.dumps(verifiers)}", "run.result_ttl=86400.0"]
    engine = [f"rollout.engine={given['engine']}"] if given["engine"] else []
    launcher = the_launcher("use --attach")
    overrides = (*target.overrides, *engine, *own)
    return launcher.with_model(target.path, overrides, path, version, partial(work, model=model))


def _report(results: Mapping[str, SetResult], model: dict[str, Any], out: Path, as_json: bool) -> int:
    """Write results.json, print it or a table, and return the exit status."""
    report = {"model": model, "sets": {name: result.summary() for name, result in results.items()}}
    text = visible(json.dumps(report, indent=2, ensure_ascii=False))
    (out / "results.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        print_json(report)
    rows = []
    for name, one in report["sets"].items():
        counts = [str(one["problems"]), str(one["failed"])]
        lengths = (
            [f"{one['response_length']:.1f}", f"{one['truncated_ratio']:.1%}"] if one["completions"] else ["–"] * 2
        )
        k = max((int(metric.rpartition("@")[2]) for metric in one["metrics"]), default=0)
        for metric in (f"avg@{k}", f"pass@{k}", f"maj@{k}")[: 3 if k > 1 else k]:  # of one completion they are the same
            found = one["metrics"].get(metric)
            figures = [f"{found['value']:.1%}", f"{found['low']:.1%} to {found['high']:.1%}"] if found else ["–", ""]
            rows.append([name, metric, *figures, *counts, *lengths])
        if not k:  # no answer was judged
            reward = "–" if one["reward"] is None else f"{one['reward']:.3f}"
            rows.append([name, "reward", reward, "", *counts, *lengths])
        for problem, reasons in list(one["failures"].items())[:_FAILURES_SHOWN]:
            echo(f"{name}: {problem} has no score: {'; '.join(reasons)}", err=True)
    if not as_json:
        headings = ["set", "metric", "value", "95% interval", "problems", "failed", "tokens", "truncated"]
        Terminal().print(table(headings, rows))
    failed = sum(one["failed"] for one in report["sets"].values())
    if failed:
        echo(f"{failed} problems have no score and are in no figure; the same command tries them again", err=True)
    echo(f"all completions, and results.json, are in {out}", err=True)
    return 1 if failed else 0


async def _of_run(
    target: Target, run: str, evaluation_set: str, timeout: float, as_json: bool, **given: Any
) -> Evaluation:
    prompts = load_prompts(given["prompts"], True, "--prompts") if given["prompts"] else None
    options = {"policy_version": given["version"], "hold": bool(given["hold"]), "timeout": timeout}
    async with target.client() as client:
        return await client.evaluate(run, evaluation_set, prompts=prompts, summary_only=not as_json, **options)


def _show(result: Evaluation, as_json: bool, more: str) -> int:
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
