"""`quartet generate`: one prompt to the live policy."""

from typing import Any

import click

from quartet_client.cli.options import Target, asynchronous, json_option, targeted
from quartet_client.cli.output import completion_fields, completion_text, console, print_json


@click.command()
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send PROMPT as a user's message, rendered with the model's chat template.")
@click.option("-n", "n", type=int, help="Completions.")
@click.option("--temperature", type=float, help="Softmax temperature; 0 is greedy.")
@click.option("--max-new-tokens", type=int, help="Most tokens of a completion.")
@click.option("--seed", type=int, help="Seed, to get the same again.")
@click.option("--rollout", "address", metavar="HOST:PORT", help="Address of the rollout.")
@json_option
@targeted
@asynchronous
async def generate(target: Target, prompt: str, chat: bool, address: str | None, as_json: bool, **given: Any) -> int:
    """Complete PROMPT with the weights the rollout has now. Nothing is scored, stored or trained."""
    fields: dict[str, Any] = {"messages": {"role": "user", "content": prompt}} if chat else {"prompt": prompt}
    sampling = {name: value for name, value in given.items() if value is not None}
    if sampling:
        fields["sampling"] = sampling
    async with target.client() as client:
        completions = await client.generate(fields, address=address)
    out = console()
    for completion in completions:
        if as_json:
            print_json(completion_fields(completion), indent=None)
        else:
            out.print(completion_text(completion))
    return 0
