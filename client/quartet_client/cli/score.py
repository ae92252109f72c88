"""`quartet score`: a completion, or rows of a run's data, scored by the reward service."""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
from rich.text import Text

from quartet_client.async_client import AsyncClient
from quartet_client.cli.options import Target, json_option, print_json, table, targeted
from quartet_client.data import load_prompts
from quartet_client.errors import InputError
from quartet_client.launcher import the_launcher
from quartet_client.models import Score
from quartet_client.prompts import Prompt
from quartet_client.scoring import best, own_answers
from quartet_client.terminal import Terminal, echo
from quartet_common.sections import VerifierSection
from quartet_common.text import one_line

_ROWS = 20
_AT_ONCE = 4  # rows: few reward functions have more workers
Row = tuple[Prompt, list[str], list[VerifierSection]]
"""A prompt, its completions, and its verifiers."""


@click.command()
@click.argument("what", metavar="COMPLETION|RUN.toml")
@click.option("--answer", default="", help="The reference answer of COMPLETION.")
@click.option("--verifier", "verifiers", multiple=True, help="A verifier; may be repeated. Default: the run file's.")
@click.option("--rows", type=click.IntRange(min=1), help=f"Rows of data.train, from its first. Default: {_ROWS}.")
@click.option("--completion", "text", help="The completion of each row; in it {NAME} is a column or gt_answer.")
@click.option(
    "--completions", "file", type=click.Path(path_type=Path), help="A file with the rows' completions, a line each."
)
@click.option("--attach", is_flag=True, help="Use the reward service at addresses.reward instead of starting one.")
@json_option
@targeted
def score(
    target: Target,
    what: str,
    answer: str,
    verifiers: tuple[str, ...],
    rows: int | None,
    text: str | None,
    file: Path | None,
    attach: bool,
    as_json: bool,
) -> int:
    """Score COMPLETION (- for standard input) against --answer, or rows of a run file's training data.

    With RUN.toml the run's verifiers score, with all of each row: reference, tests and columns. The completion is the
    row's gt_answer, as text, in tags and in a box, whichever gets most: a sound reward is at its maximum. With
    --completions a line is a text, or in a file named *.jsonl a JSON text or an object with "completion".

    Exit status 1 if a verifier failed.
    """
    if not what.endswith(".toml"):
        if rows or text is not None or file or attach:
            raise click.UsageError("--rows, --completion, --completions and --attach go with a run file, RUN.toml")
        return asyncio.run(_score_text(target, sys.stdin.read() if what == "-" else what, answer, verifiers, as_json))
    if answer or verifiers or target.path or (text is not None and file):
        raise click.UsageError(
            "RUN.toml goes without --answer, --verifier, --config; --completion without --completions"
        )
    target = Target(Path(what), target.overrides)
    work = partial(_score_rows, _rows_of(target, rows, text, file), as_json)
    if attach:

        async def attached() -> int:
            async with target.client() as client:
                return await work(client)

        return asyncio.run(attached())
    launcher = the_launcher("start the reward service yourself and use --attach")
    return launcher.with_reward_service(Path(what), target.overrides, work)


async def _score_text(target: Target, text: str, answer: str, verifiers: tuple[str, ...], as_json: bool) -> int:
    chosen = verifiers or target.config().run.verifiers
    async with target.client() as client:
        result = (await client.score([text], {"prompt": "?", "gt_answer": answer}, chosen))[0]
    if as_json:
        print_json(result, indent=None)
    elif result.failure:
        Terminal().print(f"no score: {result.failure}", style="red")
    else:
        line = Text(f"reward {result.reward:g}  {result.outcome}", _style(result))
        line.append(one_line(f"  parsed '{result.parsed_answer}'  {result.reason}"), "dim")
        Terminal().print(line)
    return 1 if result.failure else 0


def _style(result: Score) -> str:
    return "red" if result.failure else "green" if result.outcome == "correct" else "yellow"


def _rows_of(target: Target, rows: int | None, text: str | None, file: Path | None) -> list[Row]:
    config = target.config()
    if config.section.train is None:
        raise InputError("data.train is missing: name the source of the rows, such as a JSONL file")
    given = None if file is None else _read_completions(file)
    wanted = rows or (_ROWS if given is None else len(given))
    sources = config.section.train if isinstance(config.section.train, list) else [config.section.train]
    prompts = [prompt for source in sources for prompt in load_prompts(source)][:wanted]
    if given is not None and len(given) != len(prompts):
        raise InputError(
            f"--completions: {file} has {len(given)}, and there are {len(prompts)} rows; give one for each"
        )
    if given is not None:
        completions = [[each] for each in given]
    else:
        completions = [own_answers(prompt) if text is None else [_filled(text, prompt)] for prompt in prompts]
    verifiers = [prompt.verifiers or config.run.verifiers for prompt in prompts]
    kept = [[one for one in each if one.name != "length"] for each in verifiers]
    if kept != verifiers:
        echo("the verifier 'length' is left out: it needs the number of tokens, and nothing is tokenized", err=True)
    return list(zip(prompts, completions, kept, strict=True))


def _filled(text: str, prompt: Prompt) -> str:
    values = {"gt_answer": prompt.gt_answer, **prompt.columns}
    return re.sub(r"\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), text)


def _read_completions(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return (
        [_text_of(line, f"{file}, line {at}") for at, line in enumerate(lines, 1)] if file.suffix == ".jsonl" else lines
    )


def _text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
        text = value["completion"] if isinstance(value, dict) else value
        if isinstance(text, str):
            return text
    except (ValueError, KeyError, RecursionError):
        pass
    raise InputError(f'{where}: got {line[:80]}; allowed: a JSON text, or an object with the text "completion"')


async def score_all(client: AsyncClient, rows: Sequence[Row]) -> list[list[Score]]:
    """Return the scores of each row's completions."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def scores(prompt: Prompt, completions: list[str], verifiers: list[VerifierSection]) -> list[Score]:
        async with places:
            return await client.score(completions, prompt, verifiers)

    return await asyncio.gather(*(scores(*row) for row in rows))


async def _score_rows(rows: Sequence[Row], as_json: bool, client: AsyncClient) -> int:
    """Score and print rows, of whose completions the best count, and return the exit status."""
    out, results = Terminal(), list[Score]()
    lines: list[list[str | Text]] = []
    warning = ""
    for (prompt, completions, verifiers), scores in zip(rows, await score_all(client, rows), strict=True):
        place, result = best(scores)
        results.append(result)
        if as_json:
            print_json({"row": prompt.id, "completion": completions[place], **asdict(result)}, indent=None)
        elif not lines:
            out.print(f"the completion of {prompt.id}: {completions[place]}", soft_wrap=True)
        lines += _lines(prompt.id, result, verifiers)
        failed = [at for at, each in enumerate(scores) if each.failure and not result.failure]
        if failed and not warning:
            warning = (
                f"warning: {prompt.id}: of {completions[failed[0]]!r} there is no score: {scores[failed[0]].failure}"
            )
    if not as_json:
        out.print(table(["row", "verifier", "reward", "outcome", "reason", "time"], lines))
        out.print(_summary(results), soft_wrap=True)
    if warning:
        echo(warning, err=True)
    return 1 if any(result.failure for result in results) else 0


def _lines(name: str, result: Score, verifiers: Sequence[VerifierSection]) -> Iterator[list[str | Text]]:
    if result.failure:
        yield [name, "", Text("none", _style(result)), "", result.failure, ""]
    time = f"{result.elapsed:.3f} s"
    for given, one in zip(verifiers, result.verifiers, strict=False):
        weighted = f"{one.name} × {given.weight:g}" if given.weight != 1 else one.name
        yield [name, weighted, Text(f"{one.reward:g}", _style(result)), one.outcome, one.reason, time]
        name = time = ""
    if not result.failure and len(result.verifiers) != 1:
        yield ["", "sum", Text(f"{result.reward:g}", _style(result)), result.outcome, "", ""]


def _summary(results: Sequence[Score]) -> str:
    scored = [result for result in results if result.reward is not None]
    outcomes = Counter(result.outcome for result in scored)
    facts = [f"{count} {outcome}" for outcome, count in outcomes.most_common()]
    if len(scored) < len(results):
        facts.append(f"{len(results) - len(scored)} without a score")
    if scored:
        rewards = [result.reward or 0.0 for result in scored]
        facts.append(f"reward {sum(rewards) / len(rewards):g} on average, {min(rewards):g} to {max(rewards):g}")
        facts.append(f"at most {max(result.elapsed for result in scored):.3f} s")
    return f"{len(results)} row{'' if len(results) == 1 else 's'}: {', '.join(facts)}"
