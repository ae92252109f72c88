"""`quartet rescore`: stored completions scored again, by another verifier; old and new verdicts side by side."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from quartet_client.async_client import AsyncClient
from quartet_client.cli.options import Target, json_option, print_json, table, targeted
from quartet_client.cli.score import score_all
from quartet_client.data import DataSection, DataSource, load_prompts
from quartet_client.errors import InputError
from quartet_client.launcher import the_launcher
from quartet_client.prompts import Prompt
from quartet_client.terminal import Terminal, echo
from quartet_common.proportions import SOLVED
from quartet_common.sections import VerifierSection, by_name

_SHOWN = 20
_FORMS = (
    "SET.jsonl of `quartet eval`, evaluations/SET-step-N.jsonl or rollouts.jsonl of a run (with prompt_id in each "
    "score), or a folder of such files"
)
_Stored = tuple[str, Prompt, list[dict[str, Any]]]
"""A set, a problem of it, and its completions, each with "text", "reward" and "ans_acc"."""


@click.command()
@click.argument("stored", metavar="FILE|FOLDER", type=click.Path(path_type=Path))
@click.option("--verifier", "verifiers", multiple=True, help="A verifier; may be repeated. Default: the problem's own.")
@json_option
@targeted
def rescore(target: Target, stored: Path, verifiers: tuple[str, ...], as_json: bool) -> int:
    """Score stored completions again; print both scores, how many verdicts changed, and which.

    FILE is SET.jsonl of `quartet eval`, a file in a run's evaluations/, or its rollouts.jsonl, whose steps are sets;
    FOLDER is one with such files, or the run's, of which it means evaluations/. References of a run's problems are
    taken from the data of its run.toml, or of --config, by the problems' ids.

    Exit status 1 if a verifier failed; such completions are in no figure.
    """
    files = sorted((stored / "evaluations").glob("*.jsonl"))
    if not files and (stored / "metrics.jsonl").is_file():
        raise InputError(
            f"FOLDER: the run in '{stored}' has no evaluations/; allowed: '{stored}/rollouts.jsonl', or {_FORMS}"
        )
    files = files or sorted(stored.glob("*.jsonl")) or [stored]
    home = next((one for one in files[0].resolve().parents[:2] if (one / "run.toml").is_file()), None)
    if target.path is None and home:
        target = Target(home / "run.toml", target.overrides)
    if verifiers:
        target = Target(target.path, (*target.overrides, f"run.verifiers={json.dumps(verifiers)}"))
    config = target.config()
    problems = [one for file in files for one in _read(file, config.section)]
    chosen = [VerifierSection.model_validate(by_name(one)) for one in verifiers]
    work = partial(_rescore, problems, chosen, config.run.verifiers, as_json)
    launcher = the_launcher("score rows of a run file by `quartet score RUN.toml --completions FILE --attach`")
    return launcher.with_reward_service(target.path, target.overrides, work)


def _read(file: Path, data: DataSection) -> Iterator[_Stored]:
    """Yield what a file has. Raises InputError for another form, or where a reference is unknown."""

    @cache
    def problems(key: str) -> dict[str, list[Prompt]]:
        found: dict[str, list[Prompt]] = {}
        for name, source in data.sources():
            if name.partition("[")[0] == key:
                for prompt in load_prompts(source, key=name):
                    found.setdefault(prompt.id, []).append(prompt)
        return found

    def problem(key: str, name: str, place: str) -> Prompt:
        found = problems(key).get(name, [])
        if len(found) != 1:
            raise InputError(
                f"{file}, {place}: its reference is unknown: {len(found)} problems of {key} are named '{name}'; "
                "allowed: one; give the run's file by --config"
            )
        return found[0]

    for place, record in DataSource(path=file).rows("FILE"):
        match record:
            case {"row": row, "completions": completions}:
                yield file.stem, Prompt.parse(row, f"{file}, {place}"), completions
            case {"prediction": text, "prompt_id": name}:
                known = problem("data.evaluation." + re.sub(r"-step-\d+$", "", file.stem), name, place)
                yield file.stem, known, [{**record, "text": text, "ans_acc": record["ans_valid"]}]
            case {"train_step": step, "rollout": texts, "scores": scores} if len(texts) == len(scores) and all(
                "prompt_id" in one for one in scores
            ):
                shown = zip(texts, scores, strict=True)
                for name, own in groupby(shown, key=lambda one: one[1]["prompt_id"]):
                    known = problem("data.train", name, place)
                    completions = [
                        {**score, "text": text[score["prompt_characters"] :], "ans_acc": score["ans_valid"]}
                        for text, score in own
                    ]
                    yield f"{file.stem}-step-{step}", known, completions
            case _:
                raise InputError(f"{file}, {place}: it has {', '.join(record)}; allowed: {_FORMS}")


def _verdict(accuracy: float | None) -> str:
    return "unjudged" if accuracy is None else "right" if accuracy >= SOLVED else "wrong"


async def _rescore(
    problems: Sequence[_Stored],
    chosen: list[VerifierSection],
    default: list[VerifierSection],
    as_json: bool,
    client: AsyncClient,
) -> int:
    """Score, print, and return the exit status."""
    rows = [
        (prompt, [one["text"] for one in completions], chosen or prompt.verifiers or default)
        for _, prompt, completions in problems
    ]
    results: list[dict[str, Any]] = []
    for (name, prompt, completions), scores in zip(problems, await score_all(client, rows), strict=True):
        for index, (one, new) in enumerate(zip(completions, scores, strict=True)):
            old = {key: one.get(key) for key in ("reward", "ans_acc", "outcome", "reason")}
            change = [_verdict(old["ans_acc"]), "failed" if new.failure else _verdict(new.ans_acc)]
            place = {"set": name, "id": prompt.id, "index": index, "changed": change[0] != change[1]}
            results.append({**place, "change": change, "old": old, "new": asdict(new)})
    failed = sum(bool(one["new"]["failure"]) for one in results)
    if as_json:
        print_json(results)
        return 1 if failed else 0
    lines = []
    for name in dict.fromkeys(name for name, _, _ in problems):
        own = [one for one in results if one["set"] == name]
        both = [one for one in own if not one["new"]["failure"]]
        means = []
        for key in ("ans_acc", "reward"):
            for when in ("old", "new"):
                values = [one[when][key] for one in both if one[when][key] is not None]
                means.append(f"{sum(values) / len(values):.3f}" if values else "–")
        changed = sum(one["changed"] for one in both)
        lines.append([name, str(len(own)), str(len(own) - len(both)), str(changed), *means])
    out = Terminal()
    out.print(table(["set", "completions", "failed", "changed", "accuracy", "now", "reward", "now"], lines))
    for one in [one for one in results if one["changed"]][:_SHOWN]:
        why = one["new"]["failure"] or one["new"]["reason"]
        line = f"{one['set']}: {one['id']}, completion {one['index']}: {' -> '.join(one['change'])}"
        out.print(f"{line}{why and f': {why}'}", soft_wrap=True)
    if failed:
        echo(f"{failed} completions have no new score and are in no figure", err=True)
    return 1 if failed else 0
