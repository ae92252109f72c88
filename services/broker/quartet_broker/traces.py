"""The broker's part of a group's trace: how long it waited for a rollout and for the trainer, and its put.

The waits are recorded when they end, from Redis' own records, so that any broker process can tell of a wait that began
at another. Nothing is done unless [tracing] is configured.
"""

import time
from collections.abc import Sequence

from google.protobuf.message import DecodeError
from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys
from quartet_broker.puts import Put
from quartet_broker.store import Store
from quartet_common import tracing


def trace_submit(run_id: str, instance: experience_pb2.PromptInstance) -> None:
    """Begin the trace of an instance whose submitter did not."""
    if tracing.enabled() and not instance.traceparent:
        attributes = {"quartet.run": run_id, "quartet.instance": instance.instance_id}
        now = time.time()
        instance.traceparent = tracing.record("submit", "", now, now, root=True, attributes=attributes)


def trace_lease(run_id: str, holder: str, lease: broker_pb2.PromptLease, ticket: bytes) -> None:
    """The prompt was queued from its ticket's time until now."""
    if not tracing.enabled():
        return
    tracing.record(
        "prompt queued",
        lease.instance.traceparent,
        int(ticket.split(b"-")[0]) / 1000,
        kind="producer",
        attributes={
            "quartet.run": run_id,
            "quartet.instance": lease.instance.instance_id,
            "quartet.rollout": holder,
            "quartet.attempt": lease.attempt,
        },
    )


def trace_puts(run_id: str, puts: Sequence[Put], outcomes: Sequence[bytes], began: float) -> None:
    """Groups were put between `began` (time.time()) and now."""
    if not tracing.enabled():
        return
    for put, outcome in zip(puts, outcomes, strict=True):
        attributes = {
            "quartet.run": run_id,
            "quartet.instance": put.header.instance_id,
            "quartet.outcome": outcome.decode().lower(),
        }
        tracing.record("store group", put.header.traceparent, began, kind="server", attributes=attributes)


async def trace_batch(store: Store, run_id: str, step: int, instance_ids: Sequence[str], names: list[bytes]) -> None:
    """Groups were ready from their put until they were granted to the trainer."""
    if not tracing.enabled() or not instance_ids:
        return
    prefix = keys.prefix(run_id)
    times = [("HMGET", f"{prefix}i:{instance_id}", "finished", "taken") for instance_id in instance_ids]
    # The header is the first field of what is stored: a few hundred bytes of it.
    heads = [("GETRANGE", f"{prefix}payload:{name.decode()}", 0, 2047) for name in names]
    answers = await store.read([*times, *heads])
    for instance_id, (finished, taken), head in zip(
        instance_ids, answers[: len(times)], answers[len(times) :], strict=True
    ):
        traceparent = _header(head).traceparent
        if finished and taken and traceparent:
            attributes: dict[str, tracing.Value] = {
                "quartet.run": run_id,
                "quartet.instance": instance_id,
                "quartet.step": step,
            }
            tracing.record(
                "group ready",
                traceparent,
                int(finished) / 1000,
                int(taken) / 1000,
                kind="producer",
                attributes=attributes,
            )


def _header(head: bytes) -> experience_pb2.GroupHeader:
    """Return the header at the beginning of a stored group; an empty one if it does not stand there whole."""
    length, shift, at = 0, 0, 1
    while at < len(head):
        length |= (head[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if head[at - 1] < 0x80:
            break
    try:
        return experience_pb2.GroupHeader.FromString(head[at : at + length])
    except DecodeError:
        return experience_pb2.GroupHeader()
