"""Scores from the reward service over one long-lived ScoreStream, opened again whenever it breaks.

A verifier's failure is tried again and in the end handed to the caller as `ScoringFailed`: it never becomes a number.
While the service cannot be reached items wait, and count no attempt.

A message costs more than most verifications: what finishes within a few milliseconds travels in one, to services that
know such messages, and comes back in few.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from quartet.v1 import common_pb2, reward_pb2, reward_pb2_grpc

from quartet_common.diagnosis import Peer
from quartet_common.handshake import WaitingFor, handshake
from quartet_common.log import get_logger
from quartet_common.outage import Outage
from quartet_rollout.config import ScoringSection
from quartet_rollout.state import RolloutState
from quartet_rollout.telemetry import SCORING_RETRIES, SCORING_SECONDS

log = get_logger(__name__)

_SWEEP_SECONDS = 1.0
BATCHES = "score_stream.batches"
"""Capability of a reward service that reads ScoreStreamRequest.items."""
_GATHER_SECONDS = 0.005
_MOST_ITEMS = 256
_ENOUGH_BYTES = 4 << 20
"""A message of so many bytes goes off as it is, far below what services take."""


class ScoringFailed(Exception):
    """No score could be found. `permanent`: trying again cannot help."""

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


class Scorer:
    """The stream, and the items it has not answered."""

    def __init__(
        self,
        state: RolloutState,
        channel: grpc.aio.Channel,
        peer: Peer,
        waiting: WaitingFor,
        section: ScoringSection,
        on_raised: Callable[[reward_pb2.Failure], None],
    ):
        """`on_raised` is called the first time that a verifier raises at a place, in each run."""
        self._state, self._channel, self._section, self._waiting = state, channel, section, waiting
        self._on_raised, self._raised = on_raised, set[tuple[str, str]]()
        self._stub = reward_pb2_grpc.RewardServiceStub(channel)
        self._peer = peer
        self._thing = f"reward service at {peer.address}"
        self._outage = Outage()
        self._unsent: asyncio.Queue[_Item] = asyncio.Queue()
        self._sent: dict[str, _Item] = {}
        self._next_id = 0

    def submit(self, item: reward_pb2.ScoreItem) -> "asyncio.Future[reward_pb2.Score]":
        """Have an item scored; its `item_id` is set here. The future raises ScoringFailed; cancel it to forget it."""
        future = asyncio.get_running_loop().create_future()
        self._unsent.put_nowait(_Item(item, future, time.monotonic()))
        return future

    async def run(self) -> None:
        """Keep the stream open for as long as the service lives."""
        self._waiting.add(self._thing)
        while True:
            try:
                peer = await handshake(self._channel, common_pb2.SERVICE_KIND_ROLLOUT)
                self._set_ready(True)
                await self._stream(batches=BATCHES in peer.capabilities)
            except grpc.RpcError as error:
                self._set_ready(False)
                if self._outage.to_be_logged():
                    log.warning("scoring waits: %s", await self._peer.explain_aside(error))
            self._set_ready(False)
            self._unsend()
            await self._outage.wait()

    def _set_ready(self, ready: bool) -> None:
        if ready:
            self._waiting.discard(self._thing)
        else:
            self._waiting.add(self._thing)
        if ready != self._state.reward_ready:
            self._state.reward_ready = ready
            self._state.changes.notify()

    def _unsend(self) -> None:
        """Line up again what was sent and not answered."""
        sent, self._sent = self._sent, {}
        for entry in sent.values():
            self._unsent.put_nowait(entry)

    async def _stream(self, batches: bool) -> None:
        call = self._stub.ScoreStream()
        write = self._write_batches if batches else self._write
        tasks = {asyncio.create_task(work) for work in (write(call), self._read(call), self._sweep())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The reader knows the status the stream ended with; the writer only that it ended.
            for task in done:
                task.result()
            code = await call.code()
            if code != grpc.StatusCode.OK:
                log.warning("the score stream ended", extra={"code": code.name, "details": await call.details()})
        except (asyncio.InvalidStateError, grpc.aio.UsageError):  # a write after the end of the stream
            log.debug("write on an ended score stream")
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            entry = await self._unsent.get()
            if not entry.score.done():
                await call.write(reward_pb2.ScoreStreamRequest(item=self._send(entry)))

    async def _write_batches(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            entry = await self._unsent.get()
            if entry.score.done():
                continue
            items = [self._send(entry)]  # at once: what is neither unsent nor sent would be lost with the stream
            await asyncio.sleep(_GATHER_SECONDS)
            size = items[0].ByteSize()
            while len(items) < _MOST_ITEMS and size < _ENOUGH_BYTES and not self._unsent.empty():
                entry = self._unsent.get_nowait()
                if not entry.score.done():
                    items.append(self._send(entry))
                    size += items[-1].ByteSize()
            await call.write(reward_pb2.ScoreStreamRequest(items=items))

    def _send(self, entry: _Item) -> reward_pb2.ScoreItem:
        self._next_id += 1
        entry.item.item_id = item_id = str(self._next_id)
        entry.sent_at = time.monotonic()
        self._sent[item_id] = entry
        return entry.item

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        async for response in call:
            self._outage.over()
            for result in response.results if response.results else (response.result,):
                self._answered(result)

    def _answered(self, result: reward_pb2.ScoreResult) -> None:
        entry = self._sent.pop(result.item_id, None)
        if entry is None or entry.score.done():
            return
        kind = result.WhichOneof("result")
        if kind == "score":
            SCORING_SECONDS.observe(time.monotonic() - entry.submitted_at)
            entry.score.set_result(result.score)
        elif kind == "failure":
            self._failed(entry, result.failure)
        else:
            self._again(entry, "the reward service answered neither a score nor a failure")

    async def _sweep(self) -> None:
        """Give up on items that are never answered."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            oldest = time.monotonic() - self._section.timeout_seconds
            for item_id in [item_id for item_id, entry in self._sent.items() if entry.sent_at < oldest]:
                self._again(self._sent.pop(item_id), f"no answer within {self._section.timeout_seconds:g} s")

    def _failed(self, entry: _Item, failure: reward_pb2.Failure) -> None:
        kind = reward_pb2.FailureKind.Name(failure.kind).removeprefix("FAILURE_KIND_").lower()
        message = f"verifier failure {kind}: {failure.message}"
        at = (self._state.run_id, failure.place)
        if failure.place and at not in self._raised:
            self._raised.add(at)
            self._on_raised(failure)
        if failure.kind == reward_pb2.FAILURE_KIND_SHUT_DOWN:
            self._later(entry, self._section.backoff_seconds)
        elif failure.retryable:
            self._again(entry, message)
        else:
            entry.score.set_exception(ScoringFailed(message, permanent=True))

    def _again(self, entry: _Item, message: str) -> None:
        if entry.score.done():
            return
        entry.attempts += 1
        if entry.attempts >= self._section.attempts:
            text = f"{message} (attempt {entry.attempts} of {self._section.attempts})"
            entry.score.set_exception(ScoringFailed(text, permanent=False))
            return
        SCORING_RETRIES.inc()
        self._later(entry, self._section.backoff_seconds * 2 ** (entry.attempts - 1))

    def _later(self, entry: _Item, delay: float) -> None:
        asyncio.get_running_loop().call_later(delay, self._unsent.put_nowait, entry)
