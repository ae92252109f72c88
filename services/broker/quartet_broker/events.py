"""A run's events: ReportProgress and WatchRun."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp
from quartet.v1 import broker_pb2

from quartet_broker import keys, scripts, validation
from quartet_broker.errors import run_not_found
from quartet_broker.notifier import Notifier
from quartet_broker.store import Store
from quartet_broker.streams import SharedReads
from quartet_common.errors import invalid_argument, unavailable

_PAGE = 32
_READS_AT_ONCE = 4
_CACHE_BYTES = 16 << 20
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
    """Return the event of a stream entry. Its first field names its kind; scripts write some kinds as text."""
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


@dataclass(frozen=True)
class _Place:
    """A position in a run's events. `created` distinguishes runs of the same name."""

    run_id: str
    created: bytes
    after: str


@dataclass(frozen=True)
class _Event:
    """An event as watchers receive it: a serialized WatchRunResponse."""

    event_id: str
    response: bytes
    is_end: bool


class _Log:
    """A cache of events: watchers of the same events share one read from Redis."""

    def __init__(self, store: Store):
        self._store = store
        self._reads = SharedReads(_READS_AT_ONCE)
        self._next: OrderedDict[_Place, _Event] = OrderedDict()  # the event after each place, the latest read last
        self._bytes = 0

    async def next(self, place: _Place) -> tuple[bytes, _Event | None]:
        """Return the run's state, and the event after a place if there is one. Raises NOT_FOUND."""
        if place in self._next:
            return b"ACTIVE", self._next[place]
        return await self._reads.read(place, lambda: self._read(place))

    async def _read(self, place: _Place) -> tuple[bytes, _Event | None]:
        # The state is read first: if the run ends later, its end is after the entries read now, or wakes the watchers.
        (state, created), entries = await self._store.read(
            [
                ("HMGET", keys.run(place.run_id), "state", "created"),
                ("XRANGE", keys.prefix(place.run_id) + "events", f"({place.after}", "+", "COUNT", _PAGE),
            ]
        )
        if state is None or state == b"DELETING" or created != place.created:
            raise run_not_found(place.run_id)
        first, after = None, place.after
        for entry_id, fields in entries:
            event = decode(entry_id, fields)
            response = broker_pb2.WatchRunResponse(event=event).SerializeToString()
            found = _Event(event.event_id, response, _is_end(event))
            self._keep(_Place(place.run_id, created, after), found)
            first, after = first or found, found.event_id
        return state, first

    def _keep(self, place: _Place, event: _Event) -> None:
        replaced = self._next.pop(place, None)
        self._next[place] = event
        self._bytes += len(event.response) - (len(replaced.response) if replaced else 0)
        while self._bytes > _CACHE_BYTES:
            _, oldest = self._next.popitem(last=False)
            self._bytes -= len(oldest.response)


class _Turns:
    """Paces watchers that read past events: one message per iteration of the event loop, or per ms if they are many.

    Otherwise fifty such watchers would delay every other call by fifty messages.
    """

    _FEW, _PAUSE_SECONDS = 4, 0.001

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def turn(self) -> None:
        """Wait until the next message may be sent."""
        self._waiting += 1
        try:
            async with self._lock:
                await asyncio.sleep(0 if self._waiting <= self._FEW else self._PAUSE_SECONDS)
        finally:
            self._waiting -= 1


class Events:
    """Adds to and reads from the stream q:{run}:events, which keeps the last 10,000."""

    def __init__(self, store: Store, watched: Store, notifier: Notifier):
        """`watched`: what watchers read from."""
        self._store = store
        self._watched = watched
        self._notifier = notifier
        self._log = _Log(watched)
        self._past = _Turns()

    async def report(self, request: broker_pb2.ReportProgressRequest) -> broker_pb2.ReportProgressResponse:
        """Add an event of a trainer or rollout."""
        validation.name("run_id", request.run_id)
        kind = request.event.WhichOneof("event")
        if kind in (None, "run_state"):
            raise invalid_argument("event", kind or "no event", allowed="any kind but run_state (use FinishRun)")
        source = request.event.notice.source
        validation.check_event(kind, source)
        request.event.ClearField("event_id")
        request.event.ClearField("at")
        arguments = validation.stored("event", request.event), int(kind in validation.OF_THE_TRAINING), source
        reply = await self._store.run(scripts.ADD_EVENT, request.run_id, *arguments)
        return broker_pb2.ReportProgressResponse(event_id=reply[1].decode())

    async def watch(self, request: broker_pb2.WatchRunRequest) -> AsyncGenerator[bytes]:
        """Yield serialized responses of events after the given one, then of new ones; end after the run's end."""
        run_id = validation.name("run_id", request.run_id)
        waiter = self._notifier.waiter(run_id, "events")
        place = await self._place(run_id, request.after_event_id)
        behind = True
        while True:
            waiter.clear()
            state, event = await self._log.next(place)
            if event is not None:
                if behind:
                    await self._past.turn()
                behind = True
                yield event.response
                if event.is_end and await self._is_last_end(run_id, event.event_id):
                    return
                place = _Place(run_id, place.created, event.event_id)
                continue
            if state != b"ACTIVE":
                return
            if not await waiter.wait():
                raise unavailable("broker", "it is stopping; watch again after the last event's id")
            behind = False

    async def _is_last_end(self, run_id: str, event_id: str) -> bool:
        """Return False if the run was extended since."""
        ((state, end),) = await self._watched.read([("HMGET", keys.run(run_id), "state", "end_event")])
        return state != b"ACTIVE" and end in (None, event_id.encode())  # None: an earlier release ended it

    async def _place(self, run_id: str, after: str) -> _Place:
        (state, created), newest = await self._watched.read(
            [
                ("HMGET", keys.run(run_id), "state", "created"),
                ("XREVRANGE", keys.prefix(run_id) + "events", "+", "-", "COUNT", 1),
            ]
        )
        if state is None or state == b"DELETING":
            raise run_not_found(run_id)
        if after == "$":
            return _Place(run_id, created, newest[0][0].decode() if newest else "0-0")
        if after and not _is_event_id(after):
            raise invalid_argument("after_event_id", came=repr(after[:64]), allowed="an event's id, empty, or '$'")
        return _Place(run_id, created, after or "0-0")


def _is_event_id(text: str) -> bool:
    parts = text.split("-")
    return len(parts) <= 2 and all(p.isascii() and p.isdecimal() and len(p) <= 20 and int(p) < 2**64 - 1 for p in parts)
