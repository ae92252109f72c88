"""Scores from the reward service over one long-lived ScoreStream, reopened whenever it breaks.

A verifier's failure is retried, and finally raised as `ScoringFailed`: it never becomes a reward. While the service
cannot be reached, items wait without counting an attempt.

When a stream breaks, either the service was restarted or an item broke it, e.g. by killing the process. Unanswered
items are sent again. Items that were pending in two broken streams are suspects: up to 16 of them are sent together,
and each alone after a third break; no other item is sent meanwhile. A break counts as an attempt only for a suspect
that is alone. So an item that breaks every stream finally fails, and the others get their scores.

A message costs more than most verifications, so items that are submitted within a few milliseconds are sent in one
message, if the service supports it.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from quartet.v1 import common_pb2, reward_pb2, reward_pb2_grpc

from quartet_common.diagnosis import Peer
from quartet_common.errors import describe, is_answer
from quartet_common.handshake import WaitingFor, handshake
from quartet_common.log import get_logger
from quartet_common.outage import Outage
from quartet_common.values import LARGEST_FLOAT32
from quartet_rollout.config import ScoringSection
from quartet_rollout.metrics import SCORING_RETRIES, SCORING_SECONDS
from quartet_rollout.state import Changes, RolloutState

log = get_logger(__name__)

_SWEEP_SECONDS = 1.0
BATCHES = "score_stream.batches"
"""Capability of a reward service that reads ScoreStreamRequest.items."""
_GATHER_SECONDS = 0.005
_MOST_ITEMS = 256
_MOST_BYTES = 4 << 20
"""Of a message of several items; far below the services' limit."""
_SUSPICIOUS = 2
"""An item is a suspect after this many broken streams."""
_MOST_SUSPECTS = 16
"""Sent together, before their third break."""
_KINDS = {number: name.removeprefix("FAILURE_KIND_").lower() for name, number in reward_pb2.FailureKind.items()}
"""A later reward service may have more."""


class ScoringFailed(Exception):
    """A completion could not be scored. `permanent`: retries cannot help."""

    def __init__(self, message: str, permanent: bool):
        super().__init__(message)
        self.permanent = permanent


@dataclass(eq=False)
class _Item:
    item: reward_pb2.ScoreItem
    score: asyncio.Future[reward_pb2.Score]
    submitted_at: float
    sent_at: float = 0.0
    attempts: int = 0
    breaks: int = 0
    """Streams that broke while it was pending, since its last answer."""

    @property
    def suspect(self) -> bool:
        return self.breaks >= _SUSPICIOUS


class GroupScorer:
    """The stream and its unanswered items."""

    def __init__(
        self,
        state: RolloutState,
        channel: grpc.aio.Channel,
        peer: Peer,
        waiting: WaitingFor,
        section: ScoringSection,
        on_raised: Callable[[reward_pb2.Failure], None],
    ):
        """`on_raised` is called once per run and place in the source where a verifier raised; crashes have no place."""
        self._state, self._channel, self._section, self._waiting = state, channel, section, waiting
        self._on_raised, self._raised = on_raised, set[tuple[str, str]]()
        self._stub = reward_pb2_grpc.RewardServiceStub(channel)
        self._peer = peer
        self._awaited = f"reward service at {peer.address}"
        self._outage = Outage()
        self._unsent = deque[_Item]()
        self._suspects = deque[_Item]()
        """Unsent suspects; sent when `_unsent` is empty."""
        self._sent: dict[str, _Item] = {}
        self._moved = Changes()
        """Notified when an item is queued or answered."""
        self._numbers = itertools.count(1)

    def submit(self, item: reward_pb2.ScoreItem) -> "asyncio.Future[reward_pb2.Score]":
        """Queue an item and set its `item_id`. The future raises ScoringFailed; cancelling it drops the item."""
        future = asyncio.get_running_loop().create_future()
        self._enqueue(_Item(item, future, time.monotonic()))
        return future

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        self._waiting.add(self._awaited)
        while True:
            try:
                peer = await handshake(self._channel, common_pb2.SERVICE_KIND_ROLLOUT)
                self._set_ready(True)
                await self._stream(batches=BATCHES in peer.capabilities)
            except grpc.RpcError as error:
                self._set_ready(False)
                self._broken(error)
                if self._outage.to_be_logged():
                    log.warning("scoring waits: %s", await self._peer.explain_aside(error))
            await self._outage.wait()

    def _set_ready(self, ready: bool) -> None:
        if ready:
            self._waiting.discard(self._awaited)
        else:
            self._waiting.add(self._awaited)
        if ready != self._state.reward_ready:
            self._state.reward_ready = ready
            self._state.changes.notify()

    def _enqueue(self, entry: _Item) -> None:
        (self._suspects if entry.suspect else self._unsent).append(entry)
        self._moved.notify()

    def _broken(self, error: grpc.RpcError) -> None:
        """Queue unanswered items again, and count the break for them unless the service rejected the stream itself."""
        sent, self._sent = list(self._sent.values()), {}
        rejected = _is_refusal(error)
        if not rejected and len(sent) == 1 and sent[0].suspect:
            self._retry(sent[0], f"the score stream broke under it alone: {describe(error)}")
            return
        for entry in sent:
            entry.breaks += not rejected
            self._enqueue(entry)

    async def _stream(self, batches: bool) -> None:
        """Send and receive until the stream ends. Raises grpc.RpcError."""
        call = self._stub.ScoreStream()
        reading = asyncio.create_task(self._read(call))
        tasks = {reading, asyncio.create_task(self._write(call, batches)), asyncio.create_task(self._sweep())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await reading  # if the writer ended first, the reader raises the stream's status
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: grpc.aio.StreamStreamCall, batches: bool) -> None:
        """Send queued items; return when the stream has ended."""
        while True:
            while not self._unsent and not self._suspects:
                await self._moved.wait()
            if self._unsent:
                if batches:
                    await asyncio.sleep(_GATHER_SECONDS)
                items = self._take(self._unsent, _MOST_ITEMS if batches else 1)
            else:
                await self._all_answered()
                few = batches and self._suspects[0].breaks == _SUSPICIOUS
                items = self._take(self._suspects, _MOST_SUSPECTS if few else 1)
            if not items:
                continue
            try:
                await call.write(reward_pb2.ScoreStreamRequest(**({"items": items} if batches else {"item": items[0]})))
            except (asyncio.InvalidStateError, grpc.aio.UsageError):
                return
            if any(entry.suspect for entry in self._sent.values()):
                await self._all_answered()

    async def _all_answered(self) -> None:
        while self._sent:
            await self._moved.wait()

    def _take(self, queue: deque[_Item], most: int) -> list[reward_pb2.ScoreItem]:
        """Move the next message's items from a queue to `_sent`."""
        items: list[reward_pb2.ScoreItem] = []
        size, breaks = 0, queue[0].breaks
        while queue and len(items) < most:
            entry = queue[0]
            size += entry.item.ByteSize()
            if items and (size > _MOST_BYTES or (entry.suspect and entry.breaks != breaks)):
                break
            queue.popleft()
            if not entry.score.done():
                entry.item.item_id = item_id = str(next(self._numbers))
                entry.sent_at = time.monotonic()
                self._sent[item_id] = entry
                items.append(entry.item)
        return items

    def _take_back(self, item_id: str) -> _Item | None:
        """Remove an item from `_sent`."""
        entry = self._sent.pop(item_id, None)
        self._moved.notify()
        return entry

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        async for response in call:
            self._outage.over()
            for result in response.results if response.results else (response.result,):
                self._answered(result)
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the service ended the score stream")

    def _answered(self, result: reward_pb2.ScoreResult) -> None:
        entry = self._take_back(result.item_id)
        if entry is None or entry.score.done():
            return
        entry.breaks = 0
        kind = result.WhichOneof("result")
        if kind == "score" and (unusable := _unusable(result.score)):
            self._retry(entry, unusable)
        elif kind == "score":
            SCORING_SECONDS.observe(time.monotonic() - entry.submitted_at)
            entry.score.set_result(result.score)
        elif kind == "failure":
            self._failed(entry, result.failure)
        else:
            self._retry(entry, "the reward service answered neither a score nor a failure")

    async def _sweep(self) -> None:
        """Retry items that were not answered in time."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            oldest = time.monotonic() - self._section.timeout_seconds
            for item_id in [item_id for item_id, entry in self._sent.items() if entry.sent_at < oldest]:
                if (entry := self._take_back(item_id)) is not None:
                    self._retry(entry, f"no answer within {self._section.timeout_seconds:g} s")

    def _failed(self, entry: _Item, failure: reward_pb2.Failure) -> None:
        kind = _KINDS.get(failure.kind, str(failure.kind))
        message = f"verifier failure {kind}: {failure.message}"
        # A verifier that killed its process or timed out has no place.
        at = (self._state.run_id, failure.place)
        crashed = failure.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED
        if (failure.place or crashed) and at not in self._raised:
            self._raised.add(at)
            self._on_raised(failure)
        if failure.kind == reward_pb2.FAILURE_KIND_SHUT_DOWN:
            self._enqueue_later(entry, self._section.backoff_seconds)
        elif failure.retryable:
            self._retry(entry, message)
        else:
            entry.score.set_exception(ScoringFailed(message, permanent=True))

    def _retry(self, entry: _Item, message: str) -> None:
        if entry.score.done():
            return
        entry.attempts += 1
        if entry.attempts >= self._section.attempts:
            text = f"{message} (attempt {entry.attempts} of {self._section.attempts})"
            entry.score.set_exception(ScoringFailed(text, permanent=False))
            return
        SCORING_RETRIES.inc()
        self._enqueue_later(entry, self._section.backoff_seconds * 2 ** (entry.attempts - 1))

    def _enqueue_later(self, entry: _Item, delay: float) -> None:
        asyncio.get_running_loop().call_later(delay, self._enqueue, entry)


def _is_refusal(error: grpc.RpcError) -> bool:
    """Whether the service rejected the stream whatever its items, e.g. for its token."""
    return is_answer(error) and error.code() is not grpc.StatusCode.INVALID_ARGUMENT


def _unusable(score: reward_pb2.Score) -> str:
    """Return why a score cannot be used for training; "" if it can."""
    values = [(name, getattr(score, name)) for name in ("reward", "format_acc", "ans_acc")]
    for one in score.verifiers:
        values += [(f"reward of '{one.name}'", one.reward), (f"ans_acc of '{one.name}'", one.ans_acc)]
    for name, value in values:
        if not abs(value) <= LARGEST_FLOAT32:
            return f"the reward service answered {name} {value:g}; allowed: what is finite as float32"
    return ""
