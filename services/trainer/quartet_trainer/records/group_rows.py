"""Where the time of each trained group went, as rows of the trace: at the rollout, reward service, broker and trainer.

Nothing is measured for it. A group's transcript says when its completions were generated and scored, by the rollout's
clock; the broker's GetGroup says when it was leased, put and granted, by Redis'. Both clocks are brought to the
trainer's by what is known of the order (`clocks`): an answer of the broker was made between question and answer, a
group was granted before it arrived, and it was generated and scored between its lease and its put.
"""

import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2

from quartet_common.durations import to_seconds
from quartet_common.errors import describe
from quartet_common.log import get_logger
from quartet_trainer.fetching import Fetched
from quartet_trainer.records.clocks import Offset
from quartet_trainer.records.trace import Trace

log = get_logger(__name__)

CALL_SECONDS = 5.0
JOIN_SECONDS = 10.0
# The broker is asked for so many groups at once.
_AT_ONCE = 32
# A broker that answers more slowly than steps are trained: the newer ones are left out.
_MOST_STEPS = 16
# Redis' times of a group's moments are cut off to milliseconds.
_MOMENT_SECONDS = 0.001

LEASED = broker_pb2.GROUP_MOMENT_KIND_LEASED
PUT = broker_pb2.GROUP_MOMENT_KIND_PUT
IN_BATCH = broker_pb2.GROUP_MOMENT_KIND_IN_BATCH
READY = "broker: groups ready"


@dataclass(frozen=True)
class _Step:
    fetched: Fetched
    began: float
    ended: float


@dataclass(frozen=True)
class _Bar:
    """A span to be: see Trace.span."""

    row: str
    name: str
    began: float
    seconds: float
    about: dict[str, str | int]


@dataclass(frozen=True)
class _Broker:
    """A group's moments at the broker, in the trainer's time."""

    leased: float
    put: float
    in_batch: float


class GroupRows:
    """Writes them in a thread of its own; what it cannot find out is left out, and said once."""

    def __init__(self, trace: Trace, stub: broker_pb2_grpc.BrokerServiceStub, run_id: str):
        self._trace, self._stub, self._run_id = trace, stub, run_id
        self._redis = Offset()
        self._rollouts: dict[str, Offset] = {}
        self._steps: queue.Queue[_Step | None] = queue.Queue()
        self._closing = threading.Event()
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._write_all, name="trace-groups", daemon=True)
        self._thread.start()

    def trained(self, fetched: Fetched, began: float, ended: float) -> None:
        """A batch was trained from `began` to `ended` (time.perf_counter)."""
        if self._steps.qsize() >= _MOST_STEPS:
            self._say("the broker is asked more slowly than steps are trained: some are left out")
            return
        self._steps.put(_Step(fetched, began, ended))

    def close(self) -> None:
        """Write what is left, for a few seconds at most."""
        self._steps.put(None)
        self._thread.join(JOIN_SECONDS)
        self._closing.set()

    def _write_all(self) -> None:
        while (step := self._steps.get()) is not None and not self._closing.is_set():
            self._write(step)

    def _write(self, step: _Step) -> None:
        number = step.fetched.step
        self._trace.span("trainer: steps", "step", step.began, step.ended - step.began, step=number)
        if step.fetched.manifest.replayed:
            return  # granted and made in an earlier life, whose trace tells of it
        arrived = step.fetched.arrived_at
        bars: list[_Bar] = []
        for group, moments in self._at_broker(step.fetched.groups, arrived):
            bars += self._bars(number, group, moments, arrived)
        if granted := [bar.began + bar.seconds for bar in bars if bar.row == READY]:
            began = min(max(granted), arrived)
            bars.append(_Bar("broker: batches", "delivering", began, arrived - began, {"step": number}))
        for bar in sorted(bars, key=lambda bar: bar.began):
            self._trace.span(bar.row, bar.name, bar.began, bar.seconds, **bar.about)

    def _bars(self, step: int, group: experience_pb2.ExperienceGroup, at: _Broker, arrived: float) -> Iterator[_Bar]:
        about: dict[str, str | int] = {"group": group.header.instance_id, "step": step}
        put = at.put
        try:
            transcript = experience_pb2.GroupTranscript.FromString(group.transcript)
        except DecodeError as error:
            self._say(f"a group's transcript cannot be read: {error}")
            return
        if transcript.HasField("started_at") and transcript.completions:
            started, finished = _seconds(transcript.started_at), _seconds(transcript.finished_at)
            offset = self._rollouts.setdefault(transcript.rollout_id, Offset())
            offset.happened(at.leased, started, min(at.put + _MOMENT_SECONDS, arrived), theirs_later=finished)
            assert offset.seconds is not None
            yield from _making(transcript, started + offset.seconds, about)
            put = max(put, finished + offset.seconds)
        yield _Bar(READY, "ready", put, max(put, at.in_batch) - put, about)

    def _at_broker(
        self, groups: Sequence[experience_pb2.ExperienceGroup], arrived: float
    ) -> Iterator[tuple[experience_pb2.ExperienceGroup, _Broker]]:
        """Yield groups of which the broker tells a life that is whole."""
        found = []
        for start in range(0, len(groups), _AT_ONCE):
            some = groups[start : start + _AT_ONCE]
            sent = time.perf_counter()
            calls = [self._ask(group.header.instance_id) for group in some]
            for group, call in zip(some, calls, strict=True):
                try:
                    answer = call.result()
                except grpc.RpcError as error:
                    self._say(f"the broker does not tell of a group: {describe(error)}")
                    continue
                if not answer.HasField("answered_at"):
                    self._say("the broker is of a release that does not tell its clock")
                    continue
                for moment in answer.moments:
                    if moment.kind == IN_BATCH:
                        self._redis.happened(-math.inf, _seconds(moment.at), arrived)
                # The newest exchange counts most, so it is one that bounds from both sides.
                self._redis.happened(sent, _seconds(answer.answered_at), time.perf_counter())
                found.append((group, answer))
        for group, answer in found:
            if (moments := self._moments(answer)) is not None:
                yield group, moments

    def _ask(self, instance_id: str) -> grpc.Future:
        request = broker_pb2.GetGroupRequest(run_id=self._run_id, instance_id=instance_id)
        return self._stub.GetGroup.future(request, timeout=CALL_SECONDS)

    def _moments(self, answer: broker_pb2.GetGroupResponse) -> _Broker | None:
        """Return the last moment of each kind in the trainer's time; None if one is missing."""
        last = {moment.kind: _seconds(moment.at) for moment in answer.moments}
        offset = self._redis.seconds
        if offset is None or not {LEASED, PUT, IN_BATCH} <= last.keys():
            return None
        return _Broker(last[LEASED] + offset, last[PUT] + offset, last[IN_BATCH] + offset)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("the trace lacks something", extra={"reason": what})


def _making(transcript: experience_pb2.GroupTranscript, started: float, about: dict[str, str | int]) -> Iterator[_Bar]:
    """What rollout and reward service did; `started`: when the generation began, in the trainer's time."""
    generated = [to_seconds(one.generated_after) for one in transcript.completions]
    yield _Bar(f"rollout {transcript.rollout_id}: groups", "generation", started, max(generated), about)
    for one, done in zip(transcript.completions, generated, strict=True):
        if one.HasField("scored_after"):
            scored = to_seconds(one.scored_after)
            began = max(done, scored - to_seconds(one.score.elapsed))
            which = {**about, "completion": one.index}
            yield _Bar("reward", "verifying", started + began, max(0.0, scored - began), which)


def _seconds(timestamp: Timestamp) -> float:
    return timestamp.seconds + timestamp.nanos / 1e9
