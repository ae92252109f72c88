"""The run's events, for people: ReportProgress and WatchRun."""

from collections.abc import AsyncIterator

from google.protobuf.timestamp_pb2 import Timestamp
from quartet.v1 import broker_pb2

from quartet_broker import keys, validation
from quartet_broker.bell import Bell
from quartet_broker.store import Store, run_not_found
from quartet_common.errors import invalid_argument, unavailable

_PAGE = 256
_END_STATES = (broker_pb2.RUN_STATE_SUCCEEDED, broker_pb2.RUN_STATE_FAILED, broker_pb2.RUN_STATE_CANCELLED)


def timestamp(milliseconds: float) -> Timestamp:
    """Return a time of Redis' clock as a Timestamp."""
    result = Timestamp()
    result.FromMicroseconds(round(milliseconds * 1000))
    return result


def state_event(state: broker_pb2.RunState, reason: str = "") -> bytes:
    """Return the serialized event of a run that was made or ended."""
    return broker_pb2.RunEvent(run_state=broker_pb2.RunStateChanged(state=state, reason=reason)).SerializeToString()


def decode(entry_id: bytes, fields: list[bytes]) -> broker_pb2.RunEvent:
    """Return the event of a stream entry. Its first field says which kind it is: some are written by scripts."""
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    match fields[0]:
        case b"event":
            event = broker_pb2.RunEvent.FromString(values[b"event"])
        case b"sample":
            event = broker_pb2.RunEvent(sample=broker_pb2.GroupSample(transcript=values[b"sample"]))
        case b"gone":
            changed = broker_pb2.MemberChanged(
                member=broker_pb2.Member.FromString(values[b"gone"]), gone=True, reason=values[b"reason"].decode()
            )
            event = broker_pb2.RunEvent(member=changed)
        case b"notice":
            text = values[b"notice"].decode()
            notice = broker_pb2.Notice(level=values[b"level"].decode(), text=text, source="broker")
            event = broker_pb2.RunEvent(notice=notice)
        case other:
            raise ValueError(f"unknown kind of event in Redis: {other!r}")
    event.event_id = entry_id.decode()
    event.at.CopyFrom(timestamp(int(entry_id.partition(b"-")[0])))
    return event


def _is_end(event: broker_pb2.RunEvent) -> bool:
    return event.WhichOneof("event") == "run_state" and event.run_state.state in _END_STATES


class Events:
    """Adds to and reads from the stream q:{run}:events, which keeps at least the last 10,000."""

    def __init__(self, store: Store, bell: Bell):
        self._store = store
        self._bell = bell

    async def report(self, request: broker_pb2.ReportProgressRequest) -> broker_pb2.ReportProgressResponse:
        """Add an event of a trainer or rollout."""
        validation.name("run_id", request.run_id)
        if request.event.WhichOneof("event") in (None, "run_state"):
            came = request.event.WhichOneof("event") or "no event"
            raise invalid_argument("event", came=came, allowed="any kind but run_state (use FinishRun)")
        event = broker_pb2.RunEvent()
        event.CopyFrom(request.event)
        event.ClearField("event_id")
        event.ClearField("at")
        reply = await self._store.run("add_event", request.run_id, event.SerializeToString())
        return broker_pb2.ReportProgressResponse(event_id=reply[1].decode())

    async def watch(self, request: broker_pb2.WatchRunRequest) -> AsyncIterator[broker_pb2.WatchRunResponse]:
        """Yield events after the given one, then new ones; end after the run's end."""
        run_id = validation.name("run_id", request.run_id)
        stream = keys.prefix(run_id) + "events"
        with self._bell.waiter(run_id, "events") as waiter:
            after = await self._position(run_id, stream, request.after_event_id)
            while True:
                waiter.clear()
                # The state is read first: an end that comes later is behind the entries read now, or wakes us.
                state, entries = await self._store.read(
                    [("HGET", keys.run(run_id), "state"), ("XRANGE", stream, f"({after}", "+", "COUNT", _PAGE)]
                )
                for entry_id, fields in _pairs(entries):
                    after = entry_id.decode()
                    event = decode(entry_id, fields)
                    yield broker_pb2.WatchRunResponse(event=event)
                    if _is_end(event):
                        return
                if entries:
                    continue
                if state is None or state == b"DELETING":
                    raise run_not_found(run_id)
                if state != b"ACTIVE":
                    return
                if not await waiter.wait():
                    raise unavailable("broker", "it is stopping; watch again after the last event's id")

    async def _position(self, run_id: str, stream: str, after: str) -> str:
        state, newest = await self._store.read(
            [("HGET", keys.run(run_id), "state"), ("XREVRANGE", stream, "+", "-", "COUNT", 1)]
        )
        if state is None or state == b"DELETING":
            raise run_not_found(run_id)
        if after == "$":
            pairs = list(_pairs(newest))
            return pairs[0][0].decode() if pairs else "0-0"
        if after and not _is_event_id(after):
            raise invalid_argument("after_event_id", came=repr(after[:64]), allowed="an event's id, empty, or '$'")
        return after or "0-0"


def _is_event_id(text: str) -> bool:
    parts = text.split("-")
    return len(parts) <= 2 and all(p.isascii() and p.isdecimal() and len(p) <= 20 and int(p) < 2**64 for p in parts)


def _pairs(entries: list) -> list[tuple[bytes, list[bytes]]]:
    """Return a raw XRANGE answer as (entry id, fields); redis-py may have made pairs and dicts of it already."""
    return [
        (entry_id, [part for item in fields.items() for part in item] if isinstance(fields, dict) else fields)
        for entry_id, fields in entries or ()
    ]
