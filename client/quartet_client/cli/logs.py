"""A run's logs: the lines of all its services, in the order of their times."""

import heapq
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quartet_client.errors import InputError
from quartet_common.text import one_line

LEVELS = ("debug", "info", "warning", "error", "critical")

_HEAD = frozenset({"time", "level", "logger", "message", "service", "instance", "exc_info", "stack_info", "taskName"})
_LONGEST_READ = 8 << 20  # bytes of a file at one go


@dataclass(frozen=True)
class Line:
    """A line of a log.

    Attributes:
        at: by the clock and in the time zone of who wrote it; of a line without a time, that of the line before it.
        level: one of LEVELS; "" for a line that is no JSON: Redis', or of a program that died.
        fields: what else stands in it, by name: run, group, version, …
        raw: as it stands in the file.
    """

    at: datetime
    service: str
    level: str
    message: str
    raw: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Filter:
    """Which lines to show; empty: all.

    Attributes:
        services: of these services.
        level: of this level or above; lines without a level are then left out.
        groups: about one of these prompt instances.
        text: that contain this, in whatever case.
    """

    services: tuple[str, ...] = ()
    level: str = ""
    groups: tuple[str, ...] = ()
    text: str = ""

    def passes(self, line: Line) -> bool:
        """Return whether to show a line."""
        if self.services and line.service not in self.services:
            return False
        if self.level and (not line.level or LEVELS.index(line.level) < LEVELS.index(self.level)):
            return False
        if self.groups and str(line.fields.get("group", "")) not in self.groups:
            return False
        return self.text.casefold() in line.raw.casefold()


class LogFile:
    """A service's log, read as it grows."""

    def __init__(self, path: Path):
        self.path = path
        self._position = 0
        self._at = datetime.fromtimestamp(0, UTC).astimezone()

    def read(self) -> Iterator[Line]:
        """Yield the whole lines that came since the last call; from the beginning if the file was begun anew.

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
                        return  # half a line: the rest is still to be written
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
        told = _json(raw)
        if told is None or "message" not in told:
            return Line(self._at, self.path.stem, "", raw, raw)
        self._at = _time(told.get("time"), self._at)
        level = str(told.get("level", "")).lower()
        return Line(
            at=self._at,
            service=str(told.get("service") or self.path.stem),
            level=level if level in LEVELS else "",
            message="\n".join([one_line(str(told["message"])), *map(str, filter(None, [told.get("exc_info")]))]),
            raw=raw,
            fields={key: value for key, value in told.items() if key not in _HEAD},
        )


def _json(raw: str) -> dict[str, Any] | None:
    if not raw.startswith("{"):
        return None
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _time(text: object, before: datetime) -> datetime:
    """Return a time as `logging` writes it, "2026-11-22 08:00:00,123", local; that of the line before if it is none."""
    try:
        return datetime.strptime(str(text), f"{logging.Formatter.default_time_format},%f").astimezone()
    except ValueError:
        return before


def log_files(folder: Path) -> list[LogFile]:
    """Return the logs in a run's folder, or in its folder `logs`. Raises InputError if there are none."""
    for place in (folder / "logs", folder):
        if found := sorted(place.glob("*.log")):
            return [LogFile(path) for path in found]
    raise InputError(
        f"no logs in '{folder / 'logs'}': it must be the folder of a run that `quartet run` started here; services "
        "that are started otherwise write theirs where you sent them, e.g. the journal"
    )


def merged(files: Iterable[LogFile]) -> Iterator[Line]:
    """Yield what came in all files since the last call, by time."""
    return heapq.merge(*(file.read() for file in files), key=lambda line: line.at)
