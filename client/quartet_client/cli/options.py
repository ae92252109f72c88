"""What commands share: the services they talk to, asyncio, and how they print (rich for people, JSON for programs)."""

import asyncio
import dataclasses
import functools
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from quartet_client.async_client import AsyncClient
from quartet_client.data import DataSection
from quartet_client.models import Completion, Group
from quartet_common.config import LoadedConfig, load_config
from quartet_common.text import one_line, visible
from quartet_common.verifier_scores import turns_text


@dataclass(frozen=True)
class Target:
    """The services a command talks to: a run file's, or the defaults, with overrides."""

    path: Path | None
    overrides: tuple[str, ...]

    @property
    def names_run(self) -> bool:
        """Whether it has a run's id, beside the default one."""
        return self.path is not None or any(each.startswith("run.id") for each in self.overrides)

    def config(self) -> LoadedConfig[DataSection]:
        """Return the configuration. Raises ConfigError."""
        return load_config("data", DataSection, self.path, self.overrides)

    def client(self) -> AsyncClient:
        return AsyncClient.from_config(self.path, self.overrides)


def with_broker(values: tuple[str, ...], broker: str | None) -> tuple[str, ...]:
    return (*values, f'addresses.broker="{broker}"') if broker else values


def targeted(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options --config, --broker, --set, and their Target as its first argument."""

    @click.option("--config", "path", type=click.Path(path_type=Path), help="Run file (TOML) with [addresses].")
    @click.option("--broker", metavar="HOST:PORT", help="Address of the broker.")
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
    @functools.wraps(command)
    def wrapped(*args: Any, path: Path | None, broker: str | None, overrides: tuple[str, ...], **kwargs: Any) -> Any:
        return command(Target(path, with_broker(overrides, broker)), *args, **kwargs)

    return wrapped


def asynchronous(command: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Run a coroutine function as a command."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(command(*args, **kwargs))

    return wrapped


def connected(command: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Run a coroutine function as a `targeted` command, with a client of the services as its first argument."""

    @targeted
    @asynchronous
    @functools.wraps(command)
    async def wrapped(target: Target, *args: Any, **kwargs: Any) -> Any:
        async with target.client() as client:
            return await command(client, *args, **kwargs)

    return wrapped


run_option = click.option("--run", "run_id", help="The run; by default run.id of the run file, or 'default'.")
checkpoints_option = click.option(
    "--checkpoints",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The trainer's checkpoints. Default: those of the run file, or runs/RUN/checkpoints.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def table(headings: Sequence[str | Column], rows: Iterable[Sequence[str | Text]]) -> Table:
    made = Table(*headings, box=None, header_style="dim", pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made


def facts(values: Mapping[str, str | Text], title: str = "") -> Table:
    made = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
    )
    made.add_column(style="dim")
    made.add_column()
    for name, value in values.items():
        made.add_row(name, value)
    return made


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print dataclasses, times and contract messages as JSON; indent None: on one line."""
    click.echo(visible(json.dumps(value, default=_plain, ensure_ascii=False, indent=indent)))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Message):
        return MessageToDict(value, preserving_proto_field_name=True)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def show_group(out: Console, group: Group) -> None:
    """Print a group for people: prompt, completions and their scores."""
    if group.dead:
        reasons = "; ".join(group.dead.reasons) or "no reason was kept"
        out.print(Panel(Text(f"set aside: {reasons}", "red"), title=Text(group.instance_id), title_align="left"))
        return
    body = Text(group.prompt_text, "dim")
    for column, text in group.references.items():
        body.append("\n  " + one_line(f"{column}: {text[:400]}"), "dim")
    for completion in group.completions:
        body.append("\n")
        body.append_text(completion_text(completion))
    out.print(Panel(body, title=Text(group.prompt_id or group.instance_id), title_align="left", border_style="dim"))


def completion_text(completion: Completion) -> Text:
    """Return a completion for people: its text, then reward, outcome, version."""
    text = Text(completion.text)
    facts = [f"version {completion.policy_version}", f"{completion.tokens} tokens", completion.finish_reason]
    style = "dim"
    if completion.score and completion.score.reward is not None:
        facts = [f"reward {completion.score.reward:g}", completion.score.outcome, *facts]
        style = "green" if completion.score.outcome == "correct" else "yellow"
        if completion.score.reason:
            facts.append(completion.score.reason)
    if completion.seat:
        facts.append(f"seat {completion.seat} of episode {completion.episode}")
    if turns := turns_text(completion.turn_rewards):
        facts.append(turns)
    if completion.generated_after is not None:
        facts.append(f"generated after {completion.generated_after:.3f} s")
    if completion.scored_after is not None:
        facts.append(f"scored after {completion.scored_after:.3f} s")
    text.append("\n  " + one_line(", ".join(facts)), style)
    for one in completion.score.verifiers if completion.score else ():
        text.append("\n    " + one_line(str(one)), "dim")
    return text
