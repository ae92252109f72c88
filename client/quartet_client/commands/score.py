"""`quartet score`: what the reward service says of a completion."""

import sys

import click
from rich.text import Text

from quartet_client.cli.options import Target, asynchronous, json_option, targeted
from quartet_client.cli.output import console, print_json
from quartet_common.text import one_line


@click.command()
@click.argument("completion")
@click.option("--answer", default="", help="The reference answer.")
@click.option("--verifier", "verifiers", multiple=True, help="A verifier; may be repeated. Default: the run file's.")
@json_option
@targeted
@asynchronous
async def score(target: Target, completion: str, answer: str, verifiers: tuple[str, ...], as_json: bool) -> int:
    """Score COMPLETION (- for standard input) against --answer."""
    text = sys.stdin.read() if completion == "-" else completion
    chosen = verifiers or target.config().run.verifiers
    async with target.client() as client:
        result = (await client.score([text], {"prompt": "?", "gt_answer": answer}, chosen))[0]
    if as_json:
        print_json(result, indent=None)
    elif result.failure:
        console().print(f"no score: {result.failure}", style="red")
    else:
        style = "green" if result.outcome == "correct" else "yellow"
        line = Text(f"reward {result.reward:g}  {result.outcome}", style)
        line.append(one_line(f"  parsed '{result.parsed_answer}'  {result.reason}"), "dim")
        console().print(line)
    return 1 if result.failure else 0
