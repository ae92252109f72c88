"""The broker's part of a group's trace: how long it waited for a rollout and for the trainer, and its put.

A wait is recorded when it ends, from times in Redis, so it may have begun at another broker process. Nothing is done
unless [tracing] is configured.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError
from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys
from quartet_broker.store import Store
from quartet_common import tracing
from quartet_server.wire import HEADER, Bytes, Put, UnusualError, read_field


def _about(run_id: str, instance_id: str, **more: tracing.Value) -> dict[str, tracing.Value]:
    """Return a span's attributes."""
    return {f"quartet.{key}": value for key, value in {"run": run_id, "instance": instance_id, **more}.items()}


def trace_submit(run_id: str, instance: experience_pb2.PromptInstance) -> None:
    """Begin a trace for an instance that comes without one."""
    if tracing.enabled() and not instance.traceparent:
        now, attributes = time.time(), _about(run_id, instance.instance_id)
        instance.traceparent = tracing.record("submit", "", now, now, root=True, attributes=attributes)


def trace_lease(run_id: str, holder: str, lease: broker_pb2.PromptLease, entry: bytes) -> None:
    """Record that the prompt was queued from the time of its stream entry until now."""
    if tracing.enabled():
        attributes = _about(run_id, lease.instance.instance_id, rollout=holder, attempt=lease.attempt)
        began = int(entry.split(b"-")[0]) / 1000
        tracing.record("prompt queued", lease.instance.traceparent, began, kind="producer", attributes=attributes)


def trace_puts(run_id: str, puts: Sequence[Put], outcomes: Sequence[bytes], began: float) -> None:
    """Record that groups were put between `began` (time.time()) and now."""
    if tracing.enabled():
        for put, outcome in zip(puts, outcomes, strict=True):
            attributes = _about(run_id, put.header.instance_id, outcome=outcome.decode().lower())
            tracing.record("store group", put.header.traceparent, began, kind="server", attributes=attributes)


async def trace_ready(store: Store, run_id: str, step: int, payloads: Sequence[Bytes]) -> None:
    """Record that groups of a batch were ready from their put until they were granted to the trainer."""
    if not tracing.enabled():
        return
    headers = [header for header in map(_header, payloads) if header.traceparent]
    if not headers:
        return
    prefix = keys.prefix(run_id)
    times = await store.read([("HMGET", f"{prefix}i:{header.instance_id}", "finished", "taken") for header in headers])
    for header, (finished, taken) in zip(headers, times, strict=True):
        if finished and taken:
            attributes, when = _about(run_id, header.instance_id, step=step), (int(finished) / 1000, int(taken) / 1000)
            tracing.record("group ready", header.traceparent, *when, kind="producer", attributes=attributes)


def _header(payload: Bytes) -> experience_pb2.GroupHeader:
    """Return a stored group's header without parsing the rest; an empty one if it is not the first field."""
    with suppress(UnusualError, IndexError, DecodeError):
        begin, end = read_field(payload, 0, HEADER, len(payload))
        return experience_pb2.GroupHeader.FromString(payload[begin:end])
    return experience_pb2.GroupHeader()
