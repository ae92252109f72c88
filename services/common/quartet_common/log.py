"""Structured logs: standard `logging`, one JSON object a line, or text for people at a terminal.

A warning that comes again within a minute, its numbers aside, is counted and not written; the next one that is has the
count as `repeated`. A warning that has that field already is always written: whoever logs it counts by other means.

Fields go in by `extra`: ``log.info("leased prompts", extra={"run": run_id, "count": 3})``, or around whatever is logged
inside: ``with log_fields(group=instance_id):``. Logs go to standard error. The same thing has the same name everywhere:

    service, instance   who says it: the kind of service, and this process
    run                 the run it is about
    group               the prompt instance whose group it is about
    version, step       the policy version and the optimizer step it is about
    epoch               of a weight group or of a trainer's session
    trace               the trace it is part of, where that is traced (tracing.py)
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
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
_of_process: dict[str, str] = {}  # on every JSON line that does not say otherwise


def set_run(run_id: str) -> None:
    """Name the run that this process works for from now on; "": none."""
    _of_process.pop("run", None)
    if run_id:
        _of_process["run"] = run_id


@contextmanager
def log_fields(**fields: object) -> Iterator[None]:
    """Add fields to every line that is logged inside, in this task or thread, those of the line itself first."""
    token = _bound.set({**_bound.get({}), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


class _Surroundings(logging.Filter):
    """Gives each record what it is logged within."""

    def filter(self, record: logging.LogRecord) -> bool:
        for key, value in _bound.get({}).items():
            if not hasattr(record, key):
                setattr(record, key, value)
        if context := tracing.current():
            record.trace = context.split("-")[1]
        return True


class _RepeatedWarnings(logging.Filter):
    """Counts warnings that come again instead of letting them through."""

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
    """Names the process on each line, and its run on those that name none."""

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
        # Indented, so that no text of an exception begins like a line of this log.
        return indent(visible(stack_info), "    ")


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module."""
    return logging.getLogger(name)


def configure_logging(
    service: str, instance: str, log_format: LogFormat = "text", level: str = "info", run: str = ""
) -> None:
    """Send all logs to standard error, each with the service's name and instance id.

    Args:
        run: of a service that works for one run: every JSON line that names no other names this one.
    """
    _of_process.update(service=service, instance=instance)
    set_run(run)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Surroundings())
    handler.addFilter(_RepeatedWarnings())
    if log_format == "json":
        handler.setFormatter(
            _JsonFormatter(
                "%(asctime)s %(levelname)s %(name)s %(message)s",
                rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
            )
        )
    else:
        handler.setFormatter(_TextFormatter(f"%(asctime)s {service} %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
