"""docs/commands.md: the methods of the client and the `quartet` command with every option, from their own help."""

import inspect
from collections.abc import Iterator

import click
from escaping import escaped

from quartet_client import AsyncClient
from quartet_client.cli.main import cli

HEAD = """\
# The client's methods and commands

Made from their own help by `docs/tools/write.py`; [client.md](client.md) shows how they are used.

## Methods

Of `Client` and `AsyncClient`. What is in brackets may be left out.

| method | |
|---|---|
"""
ALIASES = ("life",)
"""Methods that are kept for programs of earlier releases."""


def page() -> str:
    """The page."""
    named = inspect.getmembers(AsyncClient, inspect.isroutine)
    methods = [(name, method) for name, method in named if not name.startswith("_") and name not in ALIASES]
    rows = [
        f"| `{name}{_arguments(method)}` | {_cell(_first(inspect.getdoc(method) or ''))} |\n"
        for name, method in methods
    ]
    return HEAD + "".join(rows) + "".join(_section(path, command) for path, command in _commands("quartet", cli))


def _first(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _cell(text: str) -> str:
    return escaped(text).replace("|", r"\|")


def _arguments(method: object) -> str:
    found = []
    for name, parameter in inspect.signature(method).parameters.items():
        if name != "self":
            found.append(name if parameter.default is parameter.empty else f"[{name}]")
    return f"({', '.join(found)})"


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            if (below := command.get_command(click.Context(command), name)) and not below.hidden:
                yield from _commands(f"{path} {name}", below)
    else:
        yield path, command


def _paragraph(text: str) -> str:
    """Return a paragraph of help as Markdown; one that begins with Click's mark for it keeps its lines."""
    return f"```text\n{text[2:]}\n```" if text.startswith("\b\n") else _cell(" ".join(text.split()))


def _section(path: str, command: click.Command) -> str:
    usage = " ".join(command.collect_usage_pieces(click.Context(command))).replace("[OPTIONS]", "").strip()
    help_text = inspect.cleandoc(command.help or "").partition("\f")[0]
    paragraphs = [_paragraph(each) for each in help_text.split("\n\n")]
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden and each.help]
    rows = [f"| `{', '.join(each.opts)}` | {_cell(each.help or '')} |\n" for each in options]
    table = "\n| option | |\n|---|---|\n" + "".join(rows) if rows else ""
    return f"\n## `{f'{path} {usage}'.strip()}`\n\n" + "\n\n".join(paragraphs) + "\n" + table
