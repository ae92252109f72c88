"""The RPCs of RewardService. The proto is their specification."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

import grpc
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_common.durations import to_duration, to_seconds
from quartet_common.errors import ContractError, invalid_argument, resource_exhausted, unavailable
from quartet_reward.config import MOST_ITEMS
from quartet_reward.errors import InvalidItem, ShuttingDown, VerifierFailure
from quartet_reward.queue import CURRENT_RUN
from quartet_reward.sandbox.api import Execution, Job, Limits, SandboxUnavailable
from quartet_reward.sandbox.pool import Sandbox
from quartet_reward.scoring import LONG_BYTES, Result, Scorer, Scoring, failure
from quartet_reward.verifiers.base import Verifier
from quartet_server.fair_queue import Admission

# Items, of at most LONG_BYTES together, that are scored before the event loop serves other calls.
_STRIDE = 64
# A stream may live as long as its rollout: duplicates are refused among this many of its last item ids.
_REMEMBERED_IDS = 65_536
_RETRY_SECONDS = 1.0
# Results of one message.
_MOST_RESULTS = 256

Send = Callable[[Result], Awaitable[None]]

LANGUAGES = ("python",)
_LARGEST_SOURCE = 1 << 20
_LARGEST_STDIN = 16 << 20
_SECONDS = (0.1, 600.0)
_DEFAULT_SECONDS = 10.0
_MEMORY = (64 << 20, 64 << 30)
_DEFAULT_MEMORY = 512 << 20
_OUTPUT = (1, 16 << 20)
_DEFAULT_OUTPUT = 64 << 10


async def in_strides(items: Iterable[reward_pb2.ScoreItem]) -> AsyncIterator[tuple[int, reward_pb2.ScoreItem, int]]:
    """Yield index, item and size in bytes; yield to the event loop in between."""
    total = 0
    for i, item in enumerate(items):
        size = item.ByteSize()
        yield i, item, size
        total += size
        if total > LONG_BYTES or i % _STRIDE == _STRIDE - 1:
            total = 0
            await asyncio.sleep(0)


class ScoreStream:
    def __init__(
        self,
        scorer: Scorer,
        admission: Admission,
        write: Callable[[reward_pb2.ScoreStreamResponse], Awaitable[None]],
        draining: Callable[[], bool],
    ):
        self._scorer = scorer
        self._admission = admission
        self._write = write
        self._draining = draining
        self._writing = asyncio.Lock()
        self._unwritten: deque[Result] = deque()
        self._ids: dict[str, None] = {}

    async def run(self, requests: AsyncIterator[reward_pb2.ScoreStreamRequest]) -> None:
        """Score all items and write their results.

        It stops reading while no admission places are free; HTTP/2 flow control then slows the caller.

        Raises:
            ContractError: INVALID_ARGUMENT, an invalid request.
        """
        async with asyncio.TaskGroup() as group:
            async for request in requests:
                await self._score_request(request, group)

    async def _score_request(self, request: reward_pb2.ScoreStreamRequest, group: asyncio.TaskGroup) -> None:
        """Score a request's items: the immediate results are sent in one message, the rest when they are ready."""
        if len(request.items) > MOST_ITEMS:
            raise invalid_argument("items", f"{len(request.items)} items", f"at most {MOST_ITEMS}")
        if request.items and request.HasField("item"):
            raise invalid_argument("item", "`item` and `items`", "one of them")
        send = self._send_with_others if request.items else self._send
        waiting: list[tuple[reward_pb2.ScoreItem, Scoring]] = []
        async for _, item, size in in_strides(request.items or [request.item]):
            try:
                if self._draining():
                    raise ShuttingDown
                scoring = self._scorer.begin(item, "item", size)
                self._refuse_duplicate(item.item_id)
                result = scoring.result
            except VerifierFailure as error:
                result = failure(item.item_id, error)
            except ContractError as error:
                result = failure(item.item_id, InvalidItem(error.message))
            if result is None:
                waiting.append((item, scoring))
            elif request.items:
                self._unwritten.append(result)
            else:
                await send(result)
        await self._flush()
        for item, scoring in waiting:
            await self._start(item.run_id, scoring, send, group)

    def _refuse_duplicate(self, item_id: str) -> None:
        if item_id in self._ids:
            raise invalid_argument("item.item_id", f"'{item_id}' again", "a name unique in its call")
        self._ids[item_id] = None
        if len(self._ids) > _REMEMBERED_IDS:
            del self._ids[next(iter(self._ids))]

    async def _start(self, run: str, scoring: Scoring, send: Send, group: asyncio.TaskGroup) -> None:
        """Wait for admission, then start the rest of an item's scoring."""
        await self._admission.acquire(run, scoring.places)
        held = ExitStack()
        held.callback(self._admission.release, run, scoring.places)

        async def finish() -> None:
            with held:
                result = await scoring.finish()
            await send(result)

        # The callback is for a task that is cancelled before it begins: its `with` is never entered.
        group.create_task(finish()).add_done_callback(lambda _: held.close())

    async def _send(self, result: Result) -> None:
        async with self._writing:  # while the caller does not read, this blocks, and with it reading its requests
            await self._write(reward_pb2.ScoreStreamResponse(result=result))

    async def _send_with_others(self, result: Result) -> None:
        """Send a result, in one message with those that become ready while the previous message is written."""
        self._unwritten.append(result)
        await self._flush()

    async def _flush(self) -> None:
        async with self._writing:
            while self._unwritten:
                count = min(len(self._unwritten), _MOST_RESULTS)
                results = [self._unwritten.popleft() for _ in range(count)]
                await self._write(reward_pb2.ScoreStreamResponse(results=results))


def read_job(request: reward_pb2.ExecuteRequest) -> Job:
    """Return the request as a sandbox job. Raises ContractError (INVALID_ARGUMENT) with the field."""
    if request.language not in ("", *LANGUAGES):
        raise invalid_argument("language", f"'{request.language[:40]}'", ", ".join(LANGUAGES))
    source, stdin = request.source.encode(), request.stdin.encode()
    if not 1 <= len(source) <= _LARGEST_SOURCE:
        raise invalid_argument("source", f"{len(source)} bytes", f"1 to {_LARGEST_SOURCE} bytes")
    if b"\0" in source:
        raise invalid_argument("source", "null characters", "a program without null characters")
    if len(stdin) > _LARGEST_STDIN:
        raise invalid_argument("stdin", f"{len(stdin)} bytes", f"at most {_LARGEST_STDIN} bytes")
    limits = request.limits
    wall = _seconds("limits.wall_time", limits.wall_time, limits.HasField("wall_time"), _DEFAULT_SECONDS)
    return Job(
        "script",
        source,
        stdin=stdin,
        limits=Limits(
            wall_seconds=wall,
            cpu_seconds=_seconds("limits.cpu_time", limits.cpu_time, limits.HasField("cpu_time"), wall),
            memory_bytes=_bytes("limits.memory_bytes", limits.memory_bytes, _MEMORY, _DEFAULT_MEMORY),
            output_bytes=_bytes("limits.output_bytes", limits.output_bytes, _OUTPUT, _DEFAULT_OUTPUT),
        ),
    )


def _seconds(field: str, duration: Duration, given: bool, default: float) -> float:
    seconds = to_seconds(duration) if given else default
    least, most = _SECONDS
    if not least <= seconds <= most:
        raise invalid_argument(field, f"{seconds:g} s", f"{least:g} s to {most:g} s")
    return seconds


def _bytes(field: str, value: int, allowed: tuple[int, int], default: int) -> int:
    least, most = allowed
    if value and not least <= value <= most:
        raise invalid_argument(field, value, f"{least} to {most}, or 0 for {default}")
    return value or default


def _response(execution: Execution) -> reward_pb2.ExecuteResponse:
    return reward_pb2.ExecuteResponse(
        outcome=reward_pb2.ExecutionOutcome.Value(f"EXECUTION_OUTCOME_{execution.ending.name}"),
        exit_code=execution.exit_code or 0,
        signal=execution.signal or 0,
        stdout=execution.stdout.decode(errors="replace"),
        stderr=execution.stderr.decode(errors="replace"),
        elapsed=to_duration(execution.wall_seconds),
    )


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Score, ScoreStream, ListVerifiers, Execute."""

    def __init__(self, scorer: Scorer, verifiers: Mapping[str, Verifier], admission: Admission, sandbox: Sandbox):
        self._scorer = scorer
        self._sandbox = sandbox
        self._verifiers = verifiers
        self._admission = admission
        self.draining = False

    async def Score(  # noqa: N802
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreResponse:
        if self.draining:
            raise unavailable("reward", "the service is shutting down")
        if not 1 <= len(request.items) <= MOST_ITEMS:
            raise invalid_argument("items", f"{len(request.items)} items", f"1 to {MOST_ITEMS}")
        _refuse_duplicates(request.items)
        begun: list[Scoring] = []
        async for i, item, size in in_strides(request.items):
            begun.append(self._scorer.begin(item, f"items[{i}]", size))
        return reward_pb2.ScoreResponse(results=await self._finish(request.items, begun))

    async def _finish(self, items: Sequence[reward_pb2.ScoreItem], begun: list[Scoring]) -> list[Result]:
        """Finish those that wait, concurrently; they are cancelled when the call is, e.g. at its deadline."""
        waiting = {i: one for i, one in enumerate(begun) if one.result is None}
        wanted, extra = Counter(items[i].run_id for i in waiting), MOST_ITEMS - len(waiting)
        for i, one in waiting.items():  # a call needs at most MOST_ITEMS places, however long its items are
            more = min(one.places - 1, extra)
            wanted[items[i].run_id] += more
            extra -= more
        if not self._admission.try_acquire_all(wanted):
            raise self._full(wanted)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {i: group.create_task(one.finish()) for i, one in waiting.items()}
        finally:
            for run, count in wanted.items():
                self._admission.release(run, count)
        return [one.result or tasks[i].result() for i, one in enumerate(begun)]

    def _full(self, wanted: Counter[str]) -> ContractError:
        run, count = max(wanted.items(), key=lambda entry: entry[1] - self._admission.free_for(entry[0]))
        return resource_exhausted(
            "reward.max_queue",
            f"the queue has room for {self._admission.free_for(run)} items of run '{run}' and this call needs {count}",
            _RETRY_SECONDS,
        )

    async def ScoreStream(self, request_iterator, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        await ScoreStream(self._scorer, self._admission, context.write, lambda: self.draining).run(request_iterator)

    async def ListVerifiers(  # noqa: N802
        self, request: reward_pb2.ListVerifiersRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListVerifiersResponse:
        return self._listed

    @cached_property
    def _listed(self) -> reward_pb2.ListVerifiersResponse:
        """Cached: pydantic blocks the event loop for about 100 ms to make the schemas."""
        infos = [
            reward_pb2.VerifierInfo(
                name=name,
                description=verifier.description,
                parameters_schema=json.dumps(verifier.parameters.model_json_schema()),
            )
            for name, verifier in self._verifiers.items()
        ]
        return reward_pb2.ListVerifiersResponse(verifiers=infos)

    async def Execute(  # noqa: N802
        self, request: reward_pb2.ExecuteRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ExecuteResponse:
        """Run a program in the sandbox; it is killed when the call is cancelled."""
        if self.draining:
            raise unavailable("reward", "the service is shutting down")
        job, run = await asyncio.to_thread(read_job, request), request.run_id
        if not self._admission.try_acquire(run, 1):
            raise self._full(Counter({run: 1}))
        CURRENT_RUN.set(run)  # visible in this call's task only
        try:
            return await asyncio.to_thread(_response, await self._sandbox.run(job))
        except (SandboxUnavailable, ShuttingDown) as error:
            raise unavailable("sandbox", str(error)) from error
        finally:
            self._admission.release(run)


def _refuse_duplicates(items: Sequence[reward_pb2.ScoreItem]) -> None:
    first: dict[str, int] = {}
    for i, item in enumerate(items):
        if (other := first.setdefault(item.item_id, i)) != i:
            raise invalid_argument(
                f"items[{i}].item_id", f"'{item.item_id}', which items[{other}] has", "a name unique in its call"
            )
