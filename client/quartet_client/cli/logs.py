"""`quartet logs`: the lines of all services of a run, merged by time."""

import asyncio
import heapq
import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from quartet_client.cli.options import Target, asynchronous, targeted
from quartet_client.errors import InputError
from quartet_client.terminal import Terminal, echo
from quartet_common.text import one_line

LEVELS = ("debug", "info", "warning", "error", "critical")

_HEAD = frozenset({"time", "level", "logger", "message", "service", "instance", "exc_info", "stack_info", "taskName"})
_LONGEST_READ = 8 << 20  # bytes per read


@dataclass(frozen=True)
class Line:
    """A line of a log.

    Attributes:
        at: by the writer's clock and time zone; for a line without a time, that of the line before it.
        level: one of LEVELS; "" for a line that is no JSON: Redis', or of a program that died.
        fields: all others, by name: run, group, version, …
        raw: as it stands in the file.
    """

    at: datetime
    service: str
    level: str
    message: str
    raw: str
    fields: dict[str, Any] = field(default_factory=dict)


class LogFile:
    """A service's log, read as it grows."""

    def __init__(self, path: Path):
        self.path = path
        self._position = 0
        self._at = datetime.fromtimestamp(0, UTC).astimezone()

    def read(self) -> Iterator[Line]:
        """Yield the complete lines since the last call; all lines if the file was truncated.

        Raises InputError if it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._position:
                    self._position = 0
                file.seek(self._position)
                while data := file.read(_LONGEST_READ):
                    end = data.rfind(b"\n") + 1
                    if not end and len(data) < _LONGEST_READ:
                        return  # half a line, still being written
                    whole = data[: end or len(data)]
                    self._position += len(whole)
                    file.seek(self._position)
                    for raw in whole.decode(errors="replace").split("\n"):
                        if raw.strip():
                            yield self._line(raw)
        except FileNotFoundError:
            self._position = 0
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error

    def _line(self, raw: str) -> Line:
        record = _json(raw)
        if record is None or "message" not in record:
            return Line(self._at, self.path.stem, "", raw, raw)
        self._at = _time(record.get("time"), self._at)
        level = str(record.get("level", "")).lower()
        return Line(
            at=self._at,
            service=str(record.get("service") or self.path.stem),
            level=level if level in LEVELS else "",
            message="\n".join([one_line(str(record["message"])), *map(str, filter(None, [record.get("exc_info")]))]),
            raw=raw,
            fields={key: value for key, value in record.items() if key not in _HEAD},
        )


def _json(raw: str) -> dict[str, Any] | None:
    if not raw.startswith("{"):
        return None
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _time(text: object, before: datetime) -> datetime:
    """Return a time as `logging` writes it, "2026-11-22 08:00:00,123", local; that of the line before if it is none."""
    try:
        return datetime.strptime(str(text), f"{logging.Formatter.default_time_format},%f").astimezone()
    except ValueError:
        return before


def log_files(folder: Path) -> list[Path]:
    """Return the logs in a run's folder, or in its folder `logs`. Raises InputError if there are none."""
    for place in (folder / "logs", folder):
        if found := sorted(place.glob("*.log")):
            return found
    raise InputError(
        f"no logs in '{folder / 'logs'}': it must be the folder of a run that `quartet run` started here; services "
        "that are started otherwise write theirs where you sent them, e.g. the journal"
    )


def merged(files: Iterable[LogFile]) -> Iterator[Line]:
    """Yield the new lines of all files, by time."""
    return heapq.merge(*(file.read() for file in files), key=lambda line: line.at)


_LOOK_SECONDS = 0.25
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--service", "services", multiple=True, metavar="NAME", help="Only of this one; may be repeated.")
@click.option("--level", type=click.Choice(LEVELS), help="Only lines of this level or above.")
@click.option("--group", "groups", multiple=True, metavar="GROUP_ID", help="Only lines about this group; repeatable.")
@click.option("--text", default="", help="Only lines that contain this, ignoring case.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last N lines.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
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
    folder = folder or target.config().run.path
    files: dict[Path, LogFile] = {}
    levels = LEVELS[LEVELS.index(level) :] if level else ("", *LEVELS)

    def wanted(line: Line) -> bool:
        return (
            (not services or line.service in services)
            and line.level in levels
            and (not groups or str(line.fields.get("group", "")) in groups)
            and text.casefold() in line.raw.casefold()
        )

    def new_lines() -> Iterator[Line]:
        for path in log_files(folder):  # also of services that have started since
            files.setdefault(path, LogFile(path))
        return filter(wanted, merged(files.values()))

    out = Terminal()
    _print(out, deque(new_lines(), maxlen=lines), as_json)
    while follow:
        await asyncio.sleep(_LOOK_SECONDS)
        _print(out, new_lines(), as_json)
    return 0


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
    # The run is known.
    for key, value in line.fields.items():
        if key != "run":
            text.append(one_line(f" {key}={value}"), "dim")
    for further in more:
        text.append(f"\n    {further}")
    return text
