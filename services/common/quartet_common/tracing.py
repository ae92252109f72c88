"""OpenTelemetry traces, if [tracing] of the run file names an OTLP collector or a file.

One trace follows one prompt instance from its submission to the weights that were trained with it. Its context travels
as W3C `traceparent`: in the contract's messages with the instance, the score item and the group, and as gRPC metadata
with calls. Contexts are plain strings here, "" if nothing is traced, so that callers need not import OpenTelemetry; it
is imported only if traces are configured.
"""

import atexit
import io
import json
import logging
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet_common.config import ConfigError, TracingSection, read_text, split_address
from quartet_common.disk import check_file
from quartet_common.python_file import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext, Tracer

HEADER = "traceparent"
"""Key of the context in gRPC metadata."""

# https://www.w3.org/TR/trace-context/#traceparent-header, version 00; ids of zeros are invalid.
_FORM = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")

log = logging.getLogger(__name__)  # quartet_common.log imports this module

_CONNECT_SECONDS = 3.0
_EXPORT_SECONDS = 5
_PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc")
_SHUTDOWN_SECONDS = 5.0

Value = str | int | float | bool


@dataclass
class _Active:
    tracer: "Tracer"
    provider: "TracerProvider"


_active: _Active | None = None


@dataclass
class Span:
    """An open span; empty if it is not traced.

    Attributes:
        traceparent: the context to pass on; "" if it is not traced.
        attributes: added to the span when it ends.
    """

    traceparent: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)


def configure(service: str, instance: str, section: TracingSection) -> None:
    """Send this process's spans to the collector and the file of `section`; do nothing if it names neither.

    Args:
        service: "broker", "reward", "rollout", "trainer" or "client": becomes `service.name` "quartet-…".
        instance: name of this process.

    Raises:
        ConfigError: a package is not installed, the CA file cannot be read, or the file cannot be written.
    """
    global _active
    if not (section.endpoint or section.file) or _active is not None:
        return
    check(section)
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    exporters = list(_exporters(section, f"{service} {instance}"))
    resource = Resource.create({"service.name": f"quartet-{service}", "service.instance.id": instance})
    # Not OpenTelemetry's global provider, which other libraries in the process (vLLM) may set.
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(section.sample_ratio)), resource=resource, shutdown_on_exit=False
    )
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    _active = _Active(provider.get_tracer("quartet"), provider)
    atexit.register(shutdown)


def check(section: TracingSection, connect: bool = False) -> None:
    """Check all that `configure` needs; nothing is made.

    Args:
        connect: also warn if no collector answers, which may take seconds.

    Raises:
        ConfigError: as `configure`.
    """
    try:
        if section.endpoint:
            import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        if section.endpoint or section.file:
            import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        asked = f"endpoint is '{section.endpoint}'" if section.endpoint else f"file is '{section.file}'"
        raise ConfigError(
            f"tracing.{asked}, and the packages that send traces are not installed "
            f"({error.name}): {install_command(*_PACKAGES)}, or leave it out"
        ) from error
    if section.tls_ca:
        _authority(section.tls_ca)
    if section.file:
        check_file("tracing.file", section.file)
    if connect and section.endpoint:
        address = section.endpoint.rpartition("://")[2]
        try:
            socket.create_connection(split_address(address), _CONNECT_SECONDS).close()
        except OSError as error:
            reason = error.strerror or error
            log.warning("tracing.endpoint: no collector answers at %s (%s): traces are lost", address, reason)


def _authority(path: Path) -> bytes:
    """Return the PEM of the CA. Raises ConfigError."""
    pem = read_text(path, "tracing.tls_ca")
    try:
        ssl.create_default_context(cadata=pem)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"tracing.tls_ca: '{path}' holds no PEM certificate") from error
    return pem.encode()


def _exporters(section: TracingSection, process: str) -> "Iterator[SpanExporter]":
    if section.endpoint:
        import grpc
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        credentials = grpc.ssl_channel_credentials(_authority(section.tls_ca)) if section.tls_ca else None
        yield OTLPSpanExporter(
            endpoint=section.endpoint, insecure=credentials is None, credentials=credentials, timeout=_EXPORT_SECONDS
        )
    if section.file:
        try:
            yield _chrome_exporter(section.file, process)
        except OSError as error:
            raise ConfigError(f"tracing.file: cannot write '{section.file}': {error.strerror}") from error


def _chrome_exporter(path: Path, process: str) -> "SpanExporter":
    """Return an exporter that appends each span to a file, under the name of this process, in Chrome's trace format.

    The file is an array of events, one per line, without its closing bracket. Readers (ui.perfetto.dev) accept that, so
    the file is valid while processes append to it and after they are killed.

    Raises:
        OSError: the file cannot be made or written.
    """
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("x", encoding="utf-8") as new:
        new.write("[\n")
    # Unbuffered: what the formatter returns is appended whole, also where several processes append at once.
    file = io.TextIOWrapper(path.open("ab", buffering=0), encoding="utf-8", write_through=True)
    file.write(_line({"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": process}}))
    return ConsoleSpanExporter(out=file, formatter=_events)


def _events(span: "ReadableSpan") -> str:
    """Return a span as two events, its beginning and its end, since spans of one process may overlap."""
    context = span.get_span_context()
    assert context and span.start_time and span.end_time
    both = {"cat": "quartet", "name": span.name, "id": f"{context.span_id:016x}", "pid": os.getpid(), "tid": 0}
    about = {"trace": f"{context.trace_id:032x}", **(span.attributes or {})}
    begin = {"ph": "b", **both, "ts": span.start_time / 1000, "args": about}
    return _line(begin) + _line({"ph": "e", **both, "ts": span.end_time / 1000})


def _line(event: dict[str, object]) -> str:
    return json.dumps(event, default=list) + ",\n"


def enabled() -> bool:
    """Return whether this process sends traces."""
    return _active is not None


def shutdown() -> None:
    """Send the remaining spans and stop, after a few seconds even if the collector does not answer."""
    global _active
    if _active is None:
        return
    provider, _active = _active.provider, None
    thread = threading.Thread(target=provider.shutdown, name="last traces", daemon=True)
    thread.start()
    thread.join(_SHUTDOWN_SECONDS)


def is_valid(traceparent: str) -> bool:
    """Return whether a text is a W3C trace context of version 00."""
    return _FORM.fullmatch(traceparent) is not None


@contextmanager
def span(
    name: str,
    parent: str | None = None,
    *,
    root: bool = False,
    links: Sequence[str] = (),
    kind: str = "internal",
    attributes: Mapping[str, Value] | None = None,
) -> Iterator[Span]:
    """Open a span, the parent of spans and calls made inside the context in this task or thread.

    An exception that leaves the context is recorded and raised on.

    Args:
        parent: the parent's context; "": the parent is not traced, so this is not either; None: the current span.
        root: begin a new trace.
        links: contexts of other traces that the span belongs to as well.
        kind: "internal", "server", "client", "producer" or "consumer".
    """
    parent = "" if root else current() if parent is None else parent
    if _active is None or not (root or parent):
        yield Span()
        return
    from opentelemetry import trace

    made = _start(_active.tracer, name, parent, links, kind, attributes, None)
    span = Span(_text(made))
    with trace.use_span(made, end_on_exit=True):
        try:
            yield span
        finally:
            made.set_attributes(span.attributes)


def record(
    name: str,
    parent: str,
    began: float,
    ended: float | None = None,
    *,
    root: bool = False,
    links: Sequence[str] = (),
    kind: str = "internal",
    attributes: Mapping[str, Value] | None = None,
) -> str:
    """Record a span that is over, from `began` to `ended` (time.time(); None: now). Return its context.

    Args:
        parent: the parent's context; "": the parent is not traced, so this is not either.
        root: begin a new trace.
    """
    if _active is None or not (root or parent):
        return ""
    made = _start(_active.tracer, name, parent, links, kind, attributes, began)
    ended = time.time() if ended is None else ended
    made.end(end_time=max(round(ended * 1e9), round(began * 1e9)))
    return _text(made)


def current() -> str:
    """Return the context of the current span of this task or thread; "" if there is none."""
    if _active is None:
        return ""
    from opentelemetry import trace

    return _text(trace.get_current_span())


def _start(
    tracer: "Tracer",
    name: str,
    parent: str,
    links: Sequence[str],
    kind: str,
    attributes: Mapping[str, Value] | None,
    began: float | None,
) -> "OtelSpan":
    from opentelemetry import trace
    from opentelemetry.context import Context

    above = _context(parent)
    context = trace.set_span_in_context(trace.NonRecordingSpan(above), Context()) if above else Context()
    found = [each for each in map(_context, links) if each is not None]
    return tracer.start_span(
        name,
        context,
        kind=trace.SpanKind[kind.upper()],
        attributes=dict(attributes) if attributes else None,
        links=[trace.Link(each) for each in found],
        start_time=None if began is None else round(began * 1e9),
    )


def _context(traceparent: str) -> "SpanContext | None":
    from opentelemetry import trace

    found = _FORM.fullmatch(traceparent)
    if found is None:
        return None
    flags = trace.TraceFlags(int(found[3], 16))
    return trace.SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=flags)


def _text(span: "OtelSpan") -> str:
    context: Any = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return ""  # an unsampled trace need not be passed on
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
