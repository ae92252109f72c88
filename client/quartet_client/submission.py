"""Prompt instances to the broker: in calls it accepts, waiting for room where there is none."""

import asyncio
import time
from collections.abc import Iterable, Iterator

import grpc
from quartet.v1 import broker_pb2, experience_pb2

from quartet_client.connection import Connections
from quartet_client.errors import QuartetError
from quartet_client.outage import Outage, wait_for
from quartet_common import tracing

MAX_INSTANCES = 256  # of a call; the contract allows 1024, smaller calls find room in the queue sooner
MAX_BYTES = 16 << 20  # of a call; a message may have 64 MiB
DEFAULT_RETRY = 1.0  # seconds, where the broker suggests none


def batches(
    instances: Iterable[experience_pb2.PromptInstance], most: int = MAX_INSTANCES
) -> Iterator[list[experience_pb2.PromptInstance]]:
    """Cut instances into lists that fit a call each, at most `most` long."""
    batch: list[experience_pb2.PromptInstance] = []
    size = 0
    for instance in instances:
        instance_size = instance.ByteSize()
        if batch and (len(batch) >= most or size + instance_size > MAX_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(instance)
        size += instance_size
    if batch:
        yield batch


async def submit_batch(
    connections: Connections,
    run_id: str,
    batch: list[experience_pb2.PromptInstance],
    evaluation_set: str = "",
    *,
    follows: str = "",
    deadline: float | None = None,
    stop: asyncio.Event | None = None,
    outage: Outage | None = None,
) -> broker_pb2.SubmitPromptsResponse | None:
    """Submit one call's instances, waiting while the queue is full.

    Args:
        follows: id of the last instance that was submitted before. A broker that does not know it, because its Redis
            was restored from an earlier state, refuses with ABORTED: submit again from the first one on.
        deadline: loop time until which it waits for room; None: as long as it takes.
        stop: set it to give up.
        outage: of the broker; over when it says that the queue is full.

    Returns:
        The broker's answer; None if `stop` was set first.

    Raises:
        QuartetError: the broker refuses, cannot be reached, or has no room until the deadline.
    """
    _begin_traces(run_id, batch)
    request = broker_pb2.SubmitPromptsRequest(
        run_id=run_id, instances=batch, evaluation_set=evaluation_set, follows_instance_id=follows
    )
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    while not stop.is_set():
        try:
            return await connections.call("broker", "SubmitPrompts", request)
        except QuartetError as error:
            if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            if outage is not None:
                outage.over()
            pause = error.retry_after or DEFAULT_RETRY
            if deadline is not None and loop.time() + pause > deadline:
                raise
        await wait_for(stop, pause)
    return None


def _begin_traces(run_id: str, batch: list[experience_pb2.PromptInstance]) -> None:
    """Begin the trace of each instance: all that becomes of it is part of it."""
    if not tracing.enabled():
        return
    for instance in batch:
        if not instance.traceparent:
            attributes = {"quartet.run": run_id, "quartet.instance": instance.instance_id}
            now = time.time()
            instance.traceparent = tracing.record(
                "submit",
                tracing.current(),
                now,
                now,
                root=not tracing.current(),
                kind="producer",
                attributes=attributes,
            )
