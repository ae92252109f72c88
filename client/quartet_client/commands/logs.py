"""`quartet logs`: what the services of a run have said, merged by time."""

import asyncio
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from quartet_client.cli.logs import LEVELS, Filter, Line, LogFile, log_files, merged
from quartet_client.cli.options import Target, asynchronous, targeted
from quartet_client.cli.output import console
from quartet_client.terminal import echo
from quartet_common.text import one_line

_LOOK_SECONDS = 0.25
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--service", "services", multiple=True, metavar="NAME", help="Only of this one; may be repeated.")
@click.option("--level", type=click.Choice(LEVELS), help="Only lines of this level or above.")
@click.option("--group", "groups", multiple=True, metavar="GROUP_ID", help="Only lines about this group; repeatable.")
@click.option("--text", default="", help="Only lines that contain this, in whatever case.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last so many lines.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as they stand in the files.")
@targeted
@asynchronous
async def logs(
    target: Target,
    folder: Path | None,
    services: tuple[str, ...],
    level: str | None,
    groups: tuple[str, ...],
    text: str,
    lines: int | None,
    follow: bool,
    as_json: bool,
) -> int:
    """Print the logs of the run in FOLDER (by default that of the run file), the services' lines merged by time."""
    files = log_files(folder or target.config().run.path)
    wanted = Filter(services, level or "", groups, text)
    out = console()
    _print(out, deque(_passing(files, wanted), maxlen=lines), as_json)
    while follow:
        await asyncio.sleep(_LOOK_SECONDS)
        _print(out, _passing(files, wanted), as_json)
    return 0


def _passing(files: Iterable[LogFile], wanted: Filter) -> Iterable[Line]:
    return (line for line in merged(files) if wanted.passes(line))


def _print(out: Console, lines: Iterable[Line], as_json: bool) -> None:
    for line in lines:
        if as_json:
            echo(line.raw)
        else:
            out.print(_shown(line), soft_wrap=True)


def _shown(line: Line) -> Text:
    text = Text(f"{line.at:%H:%M:%S}.{line.at.microsecond // 1000:03} ", "dim")
    text.append(f"{one_line(line.service):8} ", "cyan")
    first, *more = line.message.splitlines() or [""]
    text.append(f"{line.level:7} " if line.level else "        ", _STYLES.get(line.level, ""))
    text.append(first, _STYLES.get(line.level, ""))
    # Which run it is, is known.
    for key, value in line.fields.items():
        if key != "run":
            text.append(one_line(f" {key}={value}"), "dim")
    for further in more:
        text.append(f"\n    {further}")
    return text
