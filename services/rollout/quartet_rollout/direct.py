"""Direct generation: completions of the live policy for callers, and log-probs of completions that they have; not
scored, stored or trained on.

Direct requests share the engine's window (`Concurrency`) and may use a quarter of it. While they run or wait,
fewer prompts are leased, so that the quarter becomes free as completions end. No running completion is preempted.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TypeAlias

import grpc
import numpy as np
from google.rpc import error_details_pb2
from quartet.v1 import experience_pb2, rollout_pb2

from quartet_common.errors import (
    ContractError,
    failed_precondition,
    invalid_argument,
    resource_exhausted,
    unavailable,
    unimplemented,
)
from quartet_common.tensors import decode, dtype_of, encode
from quartet_rollout.concurrency import Concurrency
from quartet_rollout.config import RolloutSection
from quartet_rollout.engines.base import UNKNOWN_VERSION, EngineCompletion, EngineError, GivesLogProbs, PromptError
from quartet_rollout.environments.registry import SINGLE_TURN
from quartet_rollout.experience import completion_info
from quartet_rollout.generation import PromptRefused, generate_completions
from quartet_rollout.membership import NO_MASKS
from quartet_rollout.metrics import COMPLETIONS, TOKENS
from quartet_rollout.state import RolloutState
from quartet_rollout.vocabulary import vocabulary_digest

_RETRY_SECONDS = 1.0
_SHARE = 4
"""Direct requests may use one part in this many of the window."""


class DirectAdmission:
    """Admits direct requests in FIFO order."""

    def __init__(self, state: RolloutState, concurrency: Concurrency, section: RolloutSection):
        """`concurrency`: the engine's, which the run's prompts share."""
        self._state, self._concurrency, self._changes = state, concurrency, state.changes
        self._most, self._queue_limit = section.max_direct_completions, section.max_direct_queued
        self._alone = section.standalone
        self._turn = asyncio.Lock()  # held by the first waiting request
        self.waiting = 0
        """Completions that wait for admission."""
        self.running = 0
        """Completions that were admitted and have not ended."""
        self._closed = ""

    def close(self, reason: str) -> None:
        """Reject all waiting and later requests, with this reason."""
        self._closed = reason
        self._changes.notify()

    @property
    def _limit(self) -> int:
        return min(self._most, self._most if self._alone else max(1, self._concurrency.window // _SHARE))

    @property
    def reserved(self) -> int:
        """Completions in the window that the run's prompts must leave free now."""
        return min(self.running + self.waiting, self._limit)

    @asynccontextmanager
    async def entered(self, completions: int) -> AsyncIterator[None]:
        """Wait for admission of `completions`, and hold it in the context.

        Raises RESOURCE_EXHAUSTED when the queue is full, with a retry delay, or for more than the limit; UNAVAILABLE
        after `close`. A caller that is cancelled while it waits leaves the queue.
        """
        self._check_open()
        if completions > self._most:
            raise resource_exhausted(
                "max_direct_completions", f"{completions} completions were asked for; allowed: {self._most}"
            )
        must_wait = self.waiting or not self._fits(completions)
        if must_wait and self.waiting + completions > self._queue_limit:
            raise resource_exhausted(
                "max_direct_queued",
                f"{self.running} completions are under way, {self.waiting} wait and {completions} more were asked for; "
                f"allowed to wait: {self._queue_limit}",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self.waiting += completions
        self._changes.notify()
        try:
            async with self._turn:
                self._check_open()
                while not self._fits(completions):
                    await self._changes.wait()
                    self._check_open()
                self.running += completions
        finally:
            self.waiting -= completions
            self._changes.notify()
        try:
            yield
        finally:
            self.running -= completions
            self._changes.notify()

    async def emptied(self) -> None:
        """Wait until no admitted completions are left."""
        while self.running:
            await self._changes.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise unavailable("rollout", self._closed)

    def _fits(self, completions: int) -> bool:
        # One request is always admitted, even if it exceeds the limit.
        return not self.running or self.running + completions <= self._limit


_STOPPING = "it is stopping; ask another rollout"

Request: TypeAlias = rollout_pb2.GenerateRequest | rollout_pb2.GenerateStreamRequest


class DirectGeneration:
    """Generates for callers, beside the run's prompts, when `admission` admits them."""

    def __init__(self, state: RolloutState, admission: DirectAdmission):
        self._state, self._admission = state, admission
        self._ids = itertools.count()
        self._calls: dict[asyncio.Task, str] = {}
        """Calls whose completions are being generated; the value is why one was interrupted."""

    async def stop(self, seconds: float) -> None:
        """Reject new and waiting requests; give running ones `seconds` to finish, then end the calls with UNAVAILABLE.

        Returns when no call is running; requests of the model endpoint may be, which end with its server.
        """
        self._admission.close(_STOPPING)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._admission.emptied()
        self.interrupt(f"{_STOPPING}, and this was not finished in time")
        await asyncio.gather(*self._calls, return_exceptions=True)

    def interrupt(self, reason: str) -> None:
        """End the running requests with UNAVAILABLE."""
        for call in self._calls:
            self._calls[call] = reason
            call.cancel()

    async def completions(self, request: Request) -> AsyncIterator[rollout_pb2.GeneratedCompletion]:
        """Yield the completions as they finish. Raises ContractError."""
        finished: asyncio.Queue[rollout_pb2.GeneratedCompletion | None] = asyncio.Queue()
        # In a task of its own: `interrupt` would end the caller's without a status while it writes to a slow reader.
        generating = asyncio.create_task(self._generate(request, finished))
        generating.add_done_callback(lambda _: finished.put_nowait(None))
        try:
            while (completion := await finished.get()) is not None:
                yield completion
                finished.task_done()
            await generating
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    async def _generate(self, request: Request, finished: asyncio.Queue) -> None:
        """Put each completion as it finishes, once the one before has been taken. Raises ContractError."""
        prompt = request.prompt
        state = self._state
        if (engine := state.engine) is None or (reader := state.reader) is None:
            raise unavailable("engine", "it is still loading", retry_after_seconds=_RETRY_SECONDS)
        self._check_serving(request)
        if request.sampling_masks and "sampling_masks" not in engine.capabilities():
            raise failed_precondition("sampling_masks", f"{NO_MASKS}, or false")
        try:
            if (name := prompt.environment.name) not in ("", SINGLE_TURN):
                raise PromptRefused("prompt.environment.name", f"'{name}'", f"'{SINGLE_TURN}': direct use is one turn")
            token_ids, wanted = await reader.read_in_turn(prompt, state.spec, experience_pb2.PURPOSE_SERVE)
            if request.sampling_masks:
                wanted = replace(wanted, settings=wanted.settings.model_copy(update={"masks": True}))
            async with (
                self._admission.entered(wanted.n),
                aclosing(generate_completions(engine, f"direct-{next(self._ids)}", token_ids, wanted)) as stream,
            ):
                self._check_serving(request)  # It may have changed during the wait.
                with self._interruptible():
                    async for completion in stream:
                        if any(version == UNKNOWN_VERSION for version, _, _ in completion.version_spans):
                            raise unavailable("policy", "the weights became unknown while this was generated")
                        TOKENS.labels("direct").inc(completion.token_ids.size)
                        COMPLETIONS.labels(completion.finish_reason).inc()
                        finished.put_nowait(_generated(completion, reader.text(completion.token_ids)))
                        await finished.join()
        except (PromptRefused, PromptError) as error:
            raise _refusal(error) from error
        except EngineError as error:
            raise unavailable("engine", str(error)) from error

    async def log_probs(self, request: rollout_pb2.LogProbsRequest) -> rollout_pb2.LogProbsResponse:
        """Return the log-probs of a completion. Raises ContractError."""
        state = self._state
        if (engine := state.engine) is None:
            raise unavailable("engine", "it is still loading", retry_after_seconds=_RETRY_SECONDS)
        if not isinstance(engine, GivesLogProbs):
            raise unimplemented("engine", "it gives no log-probs of a completion; allowed: vllm, transformers")
        prompt, completion = (_token_ids(request, name) for name in ("prompt_token_ids", "completion_token_ids"))
        if request.vocabulary and request.vocabulary != (own := vocabulary_digest(engine.tokenizer())):
            raise failed_precondition(
                "vocabulary",
                f"this model's is {own}, the caller's {request.vocabulary}: their tokens differ; a teacher needs the "
                "policy's tokenizer",
            )
        self._check_serving(request)
        try:
            async with self._admission.entered(1):
                self._check_serving(request)
                with self._interruptible():
                    version = engine.policy_version
                    found = await engine.log_probs(f"log-probs-{next(self._ids)}", [*prompt, *completion], len(prompt))
        except PromptError as error:
            fields = "prompt_token_ids", "completion_token_ids"
            field = "prompt" if error.place is None else fields[error.place >= len(prompt)]
            raise _refusal(error, field) from error
        except EngineError as error:
            raise unavailable("engine", str(error)) from error
        TOKENS.labels("log_probs").inc(len(completion))
        return rollout_pb2.LogProbsResponse(log_probs=encode(found), policy_version=version)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Context in which `interrupt` cancels the task and UNAVAILABLE is raised."""
        call = asyncio.current_task()
        assert call is not None
        self._calls[call] = ""
        try:
            yield
        except asyncio.CancelledError:
            if not self._calls[call]:
                raise  # the caller cancelled
            raise unavailable("rollout", self._calls[call]) from None
        finally:
            del self._calls[call]

    def _check_serving(self, request: Request | rollout_pb2.LogProbsRequest) -> None:
        if self._state.draining:
            raise unavailable("rollout", _STOPPING)
        if self._state.changing_run:
            raise unavailable("rollout", "it is switching to another run", retry_after_seconds=_RETRY_SECONDS)
        if isinstance(request, Request) and request.run_id and request.run_id != self._state.run_id:
            raise failed_precondition("run_id", f"{self._state.works_for}, the call is about '{request.run_id}'")
        if self._state.sleep_level:
            raise unavailable("rollout", "it sleeps; ask another, or later", retry_after_seconds=_RETRY_SECONDS)
        if self._state.policy_version == UNKNOWN_VERSION:
            raise unavailable(
                "policy", "this rollout has no weights of a known version yet", retry_after_seconds=_RETRY_SECONDS
            )


def _token_ids(request: rollout_pb2.LogProbsRequest, field: str) -> list[int]:
    """Return the tokens of a request's field. Raises ContractError."""
    tensor = getattr(request, field)
    try:
        ids = decode(tensor)
    except ValueError as error:
        raise invalid_argument(field, str(error), "int32, one dimension, at least one token") from error
    if ids.dtype != np.int32 or ids.ndim != 1 or not ids.size:
        came = f"{dtype_of(tensor)} of shape {list(ids.shape)}"
        raise invalid_argument(field, came, "int32, one dimension, at least one token")
    return ids.tolist()


def _generated(completion: EngineCompletion, text: str) -> rollout_pb2.GeneratedCompletion:
    mask = completion.mask
    return rollout_pb2.GeneratedCompletion(
        info=completion_info(completion, text),
        token_ids=encode(completion.token_ids),
        log_probs=encode(completion.log_probs),
        sampling_mask_counts=encode(mask.counts) if mask is not None else None,
        sampling_mask_token_ids=encode(mask.token_ids) if mask is not None else None,
    )


def _refusal(error: PromptRefused | PromptError, field: str = "prompt") -> ContractError:
    if isinstance(error, PromptRefused):
        return invalid_argument(error.field, error.came, error.allowed)
    # Its message names the field, e.g. "sampling.top_p is 2.0; allowed: above 0, at most 1".
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=str(error))
    details = error_details_pb2.BadRequest(field_violations=[violation])
    return ContractError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {error}", [details])
