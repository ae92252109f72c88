"""Spans in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

A file is an array of events, one a line, without its closing bracket: both readers take it so, and processes that
append to it, or are killed, leave a file that can be read.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter


def chrome_exporter(path: Path, process: str) -> SpanExporter:
    """Return an exporter that appends each span to a file, under the name of this process.

    Raises:
        OSError: the file cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("x", encoding="utf-8") as new:
        new.write("[\n")
    file = path.open("a", encoding="utf-8")
    file.write(_line({"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": process}}))
    file.flush()
    # It writes what the formatter returns and flushes: whole lines, also where several processes append.
    return ConsoleSpanExporter(out=file, formatter=_events)


def _events(span: ReadableSpan) -> str:
    """Return a span as the two events of its beginning and its end: spans of one process may overlap."""
    context = span.get_span_context()
    assert context and span.start_time and span.end_time
    both = {"cat": "quartet", "name": span.name, "id": f"{context.span_id:016x}", "pid": os.getpid(), "tid": 0}
    about = {"trace": f"{context.trace_id:032x}", **(span.attributes or {})}
    begin = {"ph": "b", **both, "ts": span.start_time / 1000, "args": about}
    return _line(begin) + _line({"ph": "e", **both, "ts": span.end_time / 1000})


def _line(event: dict[str, object]) -> str:
    return json.dumps(event, default=list) + ",\n"
