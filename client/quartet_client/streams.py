"""Submission of prompts in batches; the broker's streams of results and events; evaluations; a group's history."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import datetime

import grpc
from google.protobuf.message import Message
from quartet.v1 import broker_pb2, common_pb2, experience_pb2

from quartet_client.connection import BrokerOutage, Connections, wait_for
from quartet_client.errors import InputError, QuartetError
from quartet_client.events import CheckpointSaved, RunEvent, StepFinished, WeightsPublished
from quartet_client.from_proto import FromProto, enum_name, to_datetime
from quartet_client.models import Evaluation, Group, Handle
from quartet_common import tracing
from quartet_common.durations import to_duration
from quartet_common.text import encodable

MAX_INSTANCES = 256  # per call; the contract allows 1024, but a smaller batch has room in the queue sooner
MAX_BYTES = 16 << 20  # per call; a message may have 64 MiB


def batches(
    instances: Iterable[experience_pb2.PromptInstance], most: int = MAX_INSTANCES
) -> Iterator[list[experience_pb2.PromptInstance]]:
    """Split instances into batches that fit into one call, of at most `most` instances."""
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
    outage: BrokerOutage | None = None,
) -> broker_pb2.SubmitPromptsResponse | None:
    """Submit one batch; wait while the queue is full.

    Args:
        follows: id of the instance that was submitted before. A broker that lacks it, because its Redis was restored
            from an earlier state, answers ABORTED: submit again from the first prompt on.
        deadline: event-loop time until which to wait for room; None: no limit.
        stop: set it to give up.
        outage: ended when the broker answers that the queue is full.

    Returns:
        The broker's answer; None if `stop` was set first.

    Raises:
        QuartetError: the broker refuses, cannot be reached, or has no room before the deadline.
    """
    _begin_traces(run_id, batch)
    request = broker_pb2.SubmitPromptsRequest(
        run_id=run_id, instances=batch, evaluation_set=evaluation_set, follows_instance_id=follows
    )
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    while not stop.is_set():
        try:
            return await connections.broker.call(connections.broker.stub.SubmitPrompts, request)
        except QuartetError as error:
            if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or error.retry_after is None:
                raise  # a limit without a retry delay stays reached: waiting does not help
            if outage is not None:
                outage.over()
            pause = error.retry_after
            if deadline is not None and loop.time() + pause > deadline:
                raise
        await wait_for(stop, pause)
    return None


def _begin_traces(run_id: str, batch: list[experience_pb2.PromptInstance]) -> None:
    """Start a trace for each instance; the spans of all services join it."""
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


_STREAM_SECONDS = 300.0  # deadline of one call; a longer stream is resumed by the next call
_MAX_IDS = 65536
_PATIENCE = 60.0  # seconds that a broker may be away


async def _messages(
    connections: Connections, rpc: Callable[..., grpc.aio.UnaryStreamCall], request: Message, seconds: float
) -> AsyncGenerator:
    async with connections.broker.errors():
        await connections.broker.greet()
        call = rpc(request, timeout=seconds)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()


async def _end_outage(connections: Connections, run_id: str, outage: BrokerOutage) -> None:
    """After a failure call GetRun: its answer ends the outage. The stream itself may stay silent for long."""
    if outage.seconds:
        await connections.broker.call(connections.broker.stub.GetRun, broker_pb2.GetRunRequest(run_id=run_id))
        outage.over()


async def collect_results(
    connections: Connections, handles: Iterable[Handle], timeout: float
) -> AsyncGenerator[Group, None]:
    pending: dict[str, dict[str, None]] = {}
    for handle in handles:
        if not isinstance(handle, Handle):
            raise InputError(f"handles: got {encodable(repr(handle), 80)}; allowed: what submit returned")
        pending.setdefault(handle.run_id, {})[handle.instance_id] = None
    for run_id, ids in pending.items():
        async for group in _collect_run(connections, run_id, ids, timeout):
            yield group


async def _collect_run(
    connections: Connections, run_id: str, pending: dict[str, None], timeout: float
) -> AsyncGenerator[Group, None]:
    outage = BrokerOutage(_PATIENCE, f"results of run '{run_id}'")
    loop = asyncio.get_running_loop()
    total, deadline = len(pending), loop.time() + timeout
    while pending:
        asked = list(pending)[:_MAX_IDS]
        request = broker_pb2.CollectResultsRequest(run_id=run_id, instance_ids=asked)
        left = deadline - loop.time()
        if left <= 0:
            raise await _no_results(connections, run_id, total, len(pending), timeout)
        try:
            await _end_outage(connections, run_id, outage)
            async for message in _messages(
                connections, connections.broker.stub.CollectResults, request, min(left, _STREAM_SECONDS)
            ):
                if pending.pop(message.instance_id, "unknown") == "unknown":
                    continue  # received before a reconnect
                if message.WhichOneof("result") == "dead":
                    yield Group.from_dead(run_id, message.dead)
                else:
                    yield Group.from_transcript(run_id, message.transcript)
                deadline = loop.time() + timeout  # the caller's own time does not count
        except QuartetError as error:
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                await outage.wait_or_raise(error)


async def _no_results(connections: Connections, run_id: str, total: int, missing: int, timeout: float) -> QuartetError:
    """Return the error for a timeout without results; it says how many rollouts work."""
    answer = await connections.broker.call(connections.broker.stub.GetRun, broker_pb2.GetRunRequest(run_id=run_id))
    kinds = [member.kind for member in answer.members if member.policy_version >= 0]
    rollouts = kinds.count(common_pb2.SERVICE_KIND_ROLLOUT)
    at_work = (
        f"{rollouts} rollout{'' if rollouts == 1 else 's'} with weights at work" if rollouts else "no rollout at work"
    )
    return QuartetError(
        f"run '{run_id}': {missing} of {total} prompts have no result after {timeout:g} s without any; {at_work}",
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


async def watch_run(connections: Connections, run_id: str, after: str) -> AsyncGenerator[RunEvent, None]:
    outage = BrokerOutage(_PATIENCE, f"events of run '{run_id}'")
    while True:
        request = broker_pb2.WatchRunRequest(run_id=run_id, after_event_id=after)
        try:
            await _end_outage(connections, run_id, outage)
            async for message in _messages(connections, connections.broker.stub.WatchRun, request, _STREAM_SECONDS):
                event = RunEvent.from_proto(run_id, message.event)
                after = event.event_id
                yield event
            return  # the broker ends the stream when the run has ended and was not extended
        except QuartetError as error:
            # The broker ends a stream whose reader is too slow, with a retry delay.
            unread = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after is not None
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED and not unread:
                await outage.wait_or_raise(error)


_EVALUATION_WAIT = 20.0  # seconds of one GetEvaluation; the contract allows 30


async def evaluate_run(
    connections: Connections, run_id: str, evaluation_set: str, version: int, live: str, timeout: float, summary: bool
) -> Evaluation:
    """Evaluate a set by one version, or by the live ones under the name `live`. Raises QuartetError."""
    broker = connections.broker
    start = broker_pb2.StartEvaluationRequest(
        run_id=run_id, evaluation_set=evaluation_set, policy_version=version, live=live
    )
    started = await broker.call(broker.stub.StartEvaluation, start)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        left = max(0.0, deadline - loop.time())
        request = broker_pb2.GetEvaluationRequest(
            run_id=run_id,
            evaluation_id=started.evaluation_id,
            wait=to_duration(min(_EVALUATION_WAIT, left)),
            summary_only=summary,
        )
        answer = await broker.call(broker.stub.GetEvaluation, request, _EVALUATION_WAIT + connections.timeout)
        if answer.complete:
            return Evaluation.from_proto(run_id, started.evaluation_id, version, answer)
        if loop.time() >= deadline:
            raise QuartetError(
                f"evaluation {started.evaluation_id} of run '{run_id}': {answer.finished} of {answer.prompts} prompts "
                f"answered within {timeout:g} s; is a rollout at work{f' with version {version}' if not live else ''}?",
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )


_QUIET_SECONDS = 1.0  # without an event: then all stored events of an active run have come
_EVENTS_SECONDS = 5.0  # to read them, also where new ones come all the time
_RESULT_SECONDS = 5.0
_ANSWERED = frozenset({"ready", "leased_to_trainer", "trained", "committed", "delivered"})


@dataclass(frozen=True, slots=True)
class Moment:
    """An event in the history of a group.

    Attributes:
        kind: as GroupMomentKind in broker.proto ("submitted", "leased", …), or "trained", "published", "durable".
        who: the rollout that leased or uploaded it, else "".
    """

    at: datetime
    kind: str
    who: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupHistory(FromProto):
    """The history of a prompt instance.

    Attributes:
        state: as GroupState in broker.proto.
        step: the optimizer step it was leased, trained or committed for; -1 if none.
        policy_version: of the first published weights that were trained on it; -1 if none were, or no longer known.
        moments: oldest first, as far as the broker stores them.
        group: prompt, completions and scores, while the broker stores the transcript; else None.
        traceparent: W3C context of its trace; "" if it is not traced.
    """

    run_id: str
    instance_id: str
    state: str
    attempt: int
    holder: str
    step: int
    policy_version: int
    moments: tuple[Moment, ...]
    group: Group | None
    traceparent: str


async def group_history(connections: Connections, handle: Handle) -> GroupHistory:
    """Return the history of a group. Raises QuartetError if the broker has no record of it."""
    request = broker_pb2.GetGroupRequest(run_id=handle.run_id, instance_id=handle.instance_id)
    answer = await connections.broker.call(connections.broker.stub.GetGroup, request)
    state = enum_name(broker_pb2.GroupState, answer.state)
    moments = [_moment(moment) for moment in answer.moments]
    policy_version = -1
    if state in ("trained", "committed"):
        of_step, policy_version = await _of_step(connections, handle.run_id, answer.step)
        moments = sorted([*moments, *of_step], key=lambda moment: moment.at)
    group = await _transcript(connections, handle) if state in _ANSWERED else None
    found = {"policy_version": policy_version, "moments": tuple(moments), "group": group}
    return GroupHistory.from_proto(answer, run_id=handle.run_id, instance_id=handle.instance_id, **found)


def _moment(moment: broker_pb2.GroupMoment) -> Moment:
    detail = moment.reason
    if moment.step >= 0:
        detail = f"step {moment.step}"
    elif moment.policy_version >= 0:
        detail = f"oldest tokens of version {moment.policy_version}"
    return Moment(to_datetime(moment.at), enum_name(broker_pb2.GroupMomentKind, moment.kind), moment.who, detail)


async def _of_step(connections: Connections, run_id: str, step: int) -> tuple[list[Moment], int]:
    """Return a step's moments from the run's events, and the version that was first published with it."""
    trained = published = durable = None
    version = -1
    async for event in _events_so_far(connections, run_id):
        match event.what:
            case StepFinished(step=done, policy_version=made) if done == step:
                # A step that is replayed after a resume is published and saved again.
                published = durable = None
                trained, version = Moment(event.at, "trained", detail=f"step {step} made version {made}"), -1
            case WeightsPublished(policy_version=made, rollouts=rollouts) if made > step and not published and trained:
                detail = f"version {made} at {rollouts} rollout{'s'[: rollouts != 1]}"
                published, version = Moment(event.at, "published", detail=detail), made
            case CheckpointSaved(step=steps, path=path) if steps > step and not durable and trained:
                durable = Moment(event.at, "durable", detail=f"checkpoint of {steps} steps at {path}")
    return [moment for moment in (trained, published, durable) if moment], version


async def _events_so_far(connections: Connections, run_id: str) -> AsyncIterator[RunEvent]:
    """Yield the stored events; of an active run until none comes for _QUIET_SECONDS, or _EVENTS_SECONDS are over."""
    end = asyncio.get_running_loop().time() + _EVENTS_SECONDS
    async with aclosing(watch_run(connections, run_id, "")) as events:
        while (left := end - asyncio.get_running_loop().time()) > 0:
            try:
                async with asyncio.timeout(min(_QUIET_SECONDS, left)):
                    event = await anext(events)
            except (TimeoutError, StopAsyncIteration):
                return
            yield event


async def _transcript(connections: Connections, handle: Handle) -> Group | None:
    """Return the group if the broker still stores its transcript."""
    with suppress(QuartetError):
        async with aclosing(collect_results(connections, [handle], _RESULT_SECONDS)) as groups:
            async for group in groups:
                return group
    return None
