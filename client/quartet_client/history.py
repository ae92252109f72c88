"""The history of a group, from what the broker keeps: its moments, the events of its step, its transcript."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import datetime

from quartet.v1 import broker_pb2

from quartet_client.connection import Connections
from quartet_client.errors import QuartetError
from quartet_client.events import CheckpointSaved, RunEvent, StepFinished, WeightsPublished
from quartet_client.models import Group, Handle, enum_name, to_datetime
from quartet_client.streams import collect_results, watch_run

_QUIET_SECONDS = 1.0  # after which the events of a run that goes on are all there
_RESULT_SECONDS = 5.0
_ANSWERED = frozenset({"ready", "leased_to_trainer", "trained", "committed", "delivered"})


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a group.

    Attributes:
        kind: as GroupMomentKind in broker.proto ("submitted", "leased", …), or "trained", "published", "durable".
        who: the rollout that leased or put it; "" for the rest.
        detail: in words.
    """

    at: datetime
    kind: str
    who: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupHistory:
    """What became of a prompt instance.

    Attributes:
        state: as GroupState in broker.proto.
        step: the optimizer step it was leased, trained or committed for; -1 if none.
        policy_version: of the first weights at the rollouts that carry it; -1 if none do, or it is no longer known.
        moments: oldest first, as far as they are kept.
        group: prompt, completions and scores, while the broker keeps the transcript; else None.
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
    """Return the history of a group. Raises QuartetError if the run never saw it, or forgot it."""
    request = broker_pb2.GetGroupRequest(run_id=handle.run_id, instance_id=handle.instance_id)
    answer = await connections.call("broker", "GetGroup", request)
    state = enum_name(broker_pb2.GroupState, answer.state)
    moments = [_moment(moment) for moment in answer.moments]
    policy_version = -1
    if state in ("trained", "committed"):
        told, policy_version = await _of_step(connections, handle.run_id, answer.step)
        moments = sorted([*moments, *told], key=lambda moment: moment.at)
    group = await _transcript(connections, handle) if state in _ANSWERED else None
    return GroupHistory(
        run_id=handle.run_id,
        instance_id=handle.instance_id,
        state=state,
        attempt=answer.attempt,
        holder=answer.holder,
        step=answer.step,
        policy_version=policy_version,
        moments=tuple(moments),
        group=group,
        traceparent=answer.traceparent,
    )


def _moment(moment: broker_pb2.GroupMoment) -> Moment:
    detail = moment.reason
    if moment.step >= 0:
        detail = f"step {moment.step}"
    elif moment.policy_version >= 0:
        detail = f"oldest tokens of version {moment.policy_version}"
    return Moment(to_datetime(moment.at), enum_name(broker_pb2.GroupMomentKind, moment.kind), moment.who, detail)


async def _of_step(connections: Connections, run_id: str, step: int) -> tuple[list[Moment], int]:
    """Return what a run's events tell of a step and its weights, and the version that carried it to the rollouts."""
    trained = published = durable = None
    version = -1
    async for event in _events_so_far(connections, run_id):
        match event.what:
            case StepFinished(step=done, policy_version=made) if done == step:
                # Trained again after a resume, all that followed is of the later time.
                published = durable = None
                trained, version = Moment(event.at, "trained", detail=f"step {step} made version {made}"), -1
            case WeightsPublished(policy_version=made, rollouts=rollouts) if made > step and not published and trained:
                detail = f"version {made} at {rollouts} rollout{'s'[: rollouts != 1]}"
                published, version = Moment(event.at, "published", detail=detail), made
            case CheckpointSaved(step=steps, path=path) if steps > step and not durable and trained:
                durable = Moment(event.at, "durable", detail=f"checkpoint of {steps} steps at {path}")
    return [moment for moment in (trained, published, durable) if moment], version


async def _events_so_far(connections: Connections, run_id: str) -> AsyncIterator[RunEvent]:
    """Yield the events that are kept; of a run that goes on, until none comes for a moment."""
    async with aclosing(watch_run(connections, run_id, "")) as events:
        while True:
            try:
                async with asyncio.timeout(_QUIET_SECONDS):
                    event = await anext(events)
            except (TimeoutError, StopAsyncIteration):
                return
            yield event


async def _transcript(connections: Connections, handle: Handle) -> Group | None:
    """Return the group while its transcript is kept to be collected."""
    with suppress(QuartetError):
        async with aclosing(collect_results(connections, [handle], _RESULT_SECONDS)) as groups:
            async for group in groups:
                return group
    return None
