"""Structured logs: standard `logging`, one JSON object a line, or text for people at a terminal.

Fields go in by `extra`: ``log.info("leased prompts", extra={"run": run_id, "count": 3})``. Logs go to standard error.
"""

import logging
import sys
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

LogFormat = Literal["json", "text"]

_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "service",
    "instance",
}


class _TextFormatter(logging.Formatter):
    """`12:30:01 broker INFO leased prompts run=demo count=3`."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = " ".join(f"{key}={value}" for key, value in record.__dict__.items() if key not in _STANDARD_FIELDS)
        head, newline, rest = line.partition("\n")
        return f"{head} {fields}".rstrip() + newline + rest


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module."""
    return logging.getLogger(name)


def configure_logging(service: str, instance: str, log_format: LogFormat = "text", level: str = "info") -> None:
    """Send all logs to standard error, each with the service's name and instance id."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(
            JsonFormatter(
                "%(asctime)s %(levelname)s %(name)s %(message)s",
                rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
                static_fields={"service": service, "instance": instance},
            )
        )
    else:
        handler.setFormatter(_TextFormatter(f"%(asctime)s {service} %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
