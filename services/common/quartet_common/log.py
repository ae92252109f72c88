"""Structured logs on standard error: standard `logging` as one JSON object per line, or as text for a terminal.

A warning that repeats within a minute, with any numbers, is counted, not written; the next one that is written has the
count as `repeated`. A warning that already has this field is always written.

Fields are passed as `extra`: ``log.info("leased prompts", extra={"run": run_id, "count": 3})``, or added to all lines
inside ``with log_fields(group=instance_id):``. Their names are the same everywhere:

    service, instance   kind and name of the process
    run                 run id
    group               id of the group's prompt instance
    version, step       policy version, optimizer step
    epoch               of a weight group or of a trainer's session
    trace               trace id, if there is a trace (tracing.py)
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from textwrap import indent
from typing import Any, Literal

from pythonjsonlogger.json import JsonFormatter

from quartet_common import tracing
from quartet_common.text import Repeats, one_line, visible, without_numbers

LogFormat = Literal["json", "text"]

_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "service",
    "instance",
}


_bound: ContextVar[Mapping[str, object]] = ContextVar("log fields")
_of_process: dict[str, str] = {}  # fields of every JSON line that does not set them


def set_run(run_id: str) -> None:
    """Set the run that this process works for; "": none."""
    _of_process.pop("run", None)
    if run_id:
        _of_process["run"] = run_id


@contextmanager
def log_fields(**fields: object) -> Iterator[None]:
    """Add fields to every line logged inside, in this task or thread; a line's own fields take precedence."""
    token = _bound.set({**_bound.get({}), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


class _ContextFields(logging.Filter):
    """Adds to each record the fields of `log_fields` and the trace id."""

    def filter(self, record: logging.LogRecord) -> bool:
        for key, value in _bound.get({}).items():
            if not hasattr(record, key):
                setattr(record, key, value)
        if context := tracing.current():
            record.trace = context.split("-")[1]
        return True


class _RepeatedWarnings(logging.Filter):
    """Drops and counts repeated warnings."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or hasattr(record, "repeated"):
            return True
        since = self._repeats.count(f"{record.name} {without_numbers(record.getMessage())}")
        if since:
            record.repeated = since
        return since is not None


class _JsonFormatter(JsonFormatter):
    """Adds the process to each line, and its run to lines without one; times are in UTC, by ISO 8601."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        super().add_fields(log_data, record, message_dict)
        log_data.update({key: value for key, value in _of_process.items() if key != "run" or not log_data.get("run")})


class _TextFormatter(logging.Formatter):
    """`12:30:01 broker INFO leased prompts run=demo count=3`, a traceback indented below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = " ".join(f"{key}={value}" for key, value in record.__dict__.items() if key not in _STANDARD_FIELDS)
        return one_line(f"{super().formatMessage(record)} {fields}".rstrip())

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return self.formatStack(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        # Indented, so that no text in an exception can pass for a line of this log.
        return indent(visible(stack_info), "    ")


def json_formatter() -> logging.Formatter:
    """Return a formatter that makes one JSON object of each line."""
    names = {"asctime": "time", "levelname": "level", "name": "logger"}
    return _JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=names)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module."""
    return logging.getLogger(name)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect the text of every warning that is logged inside."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def configure_logging(
    service: str, instance: str, log_format: LogFormat = "text", level: str = "info", run: str = ""
) -> None:
    """Send all logs to standard error, each with the service's name and instance id.

    Args:
        run: for a service of one run: the run of every JSON line that names no other.
    """
    _of_process.update(service=service, instance=instance)
    set_run(run)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_ContextFields())
    handler.addFilter(_RepeatedWarnings())
    if log_format == "json":
        handler.setFormatter(json_formatter())
    else:
        handler.setFormatter(_TextFormatter(f"%(asctime)s {service} %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
