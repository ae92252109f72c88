"""An engine from a core: requests, pauses, policy versions and weights around something that is stepped by hand.

The core lives on one daemon thread. Between two steps the thread runs the commands that came from the event loop, so a
command sees every completion between two tokens: that is what makes an update in flight exact.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from quartet_common.log import get_logger

from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    EngineCompletion,
    EngineError,
    EngineStats,
    PauseMode,
    PromptError,
    SamplingSettings,
    WeightInstallError,
)
from quartet_rollout.engines.core import Core, CoreCompletion
from quartet_rollout.engines.weight_updates import WeightUpdates, result_of

if TYPE_CHECKING:
    from quartet_rollout.weights.manifest import ModelSpec

log = get_logger(__name__)
T = TypeVar("T")

CLOSE_SECONDS = 10.0
"""How long `close` waits for the thread: a step in progress cannot be interrupted."""


class _State(Enum):
    RUNNING = "running"
    DRAINING = "draining"  # Paused with mode "wait": what runs is finished, nothing is added.
    PAUSED = "paused"


@dataclass
class _Request:
    request_id: str
    prompt: list[int]
    n: int
    sampling: SamplingSettings
    outbox: asyncio.Queue[EngineCompletion | EngineError] = field(default_factory=asyncio.Queue)
    unfinished: set[str] = field(default_factory=set)


@dataclass
class _Row:
    """One completion of a request that is in the core."""

    request: _Request
    index: int
    versions: list[tuple[int, int]]  # (policy version, first token), oldest first


class ThreadedEngine(WeightUpdates):
    """`Engine` over a `Core`. `build` makes the core, on the engine's thread, and may raise EngineError."""

    weight_ranks = 1

    def __init__(
        self,
        name: str,
        build: Callable[[], Core],
        load_tokenizer: Callable[[], Any],
        load_spec: Callable[[], ModelSpec],
        capabilities: Iterable[str] = (),
    ) -> None:
        super().__init__(load_spec)
        self.name = name
        self.max_model_len = 0
        self.policy_version = UNKNOWN_VERSION
        self._build, self._load_tokenizer = build, load_tokenizer
        self._capabilities = [*capabilities, "weights.gloo", "weights.full", "weights.in_flight"]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tokenizer: Any = None
        self._thread: threading.Thread | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stats = EngineStats(running=0, waiting=0, kv_cache_use=-1.0, tokens_total=0)
        self._closed = False
        # Below: touched by the engine's thread alone.
        self._core: Core | None = None
        self._state = _State.RUNNING
        self._keep_kv_cache = False
        self._drained: list[Future[None]] = []
        self._requests: dict[str, _Request] = {}
        self._rows: dict[str, _Row] = {}
        self._parked: deque[tuple[str, _Request, int]] = deque()
        self._finished_tokens = 0
        self._failure: EngineError | None = None
        self._stop = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        if self._thread is not None:
            raise EngineError("the engine has been started already")
        self._loop = asyncio.get_running_loop()
        started: Future[tuple[int, int]] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"engine-{self.name}", daemon=True)
        self._thread.start()
        self.max_model_len, self._vocab_size = await result_of(started)
        await self.load_spec()
        self._tokenizer = await asyncio.to_thread(self._load_tokenizer)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.leave_weight_group()
        if self._thread is None:
            return
        self._commands.put(self._close)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("the engine's thread did not end in time", extra={"seconds": CLOSE_SECONDS})

    def tokenizer(self) -> Any:
        return self._tokenizer

    def stats(self) -> EngineStats:
        return self._stats

    def capabilities(self) -> list[str]:
        return list(self._capabilities)

    # -------------------------------------------------------------- requests

    async def generate(
        self, request_id: str, prompt_token_ids: np.ndarray | list[int], n: int, sampling: SamplingSettings
    ) -> AsyncIterator[EngineCompletion]:
        prompt = self._check_prompt(prompt_token_ids, n)
        request = _Request(request_id, prompt, n, sampling)
        left = n
        admitted = False
        try:
            await self._call(self._admit, request)
            admitted = True
            while left:
                item = await request.outbox.get()
                if isinstance(item, EngineError):
                    left = 0
                    raise item
                left -= 1
                yield item
        except asyncio.CancelledError:
            admitted = True  # It may have been: a cancelled call can still run.
            raise
        finally:
            if left and admitted and not self._closed:
                self._commands.put(lambda: self._abort(request_id, request))

    async def abort(self, request_id: str) -> None:
        await self._call(self._abort, request_id, None)

    def _check_prompt(self, prompt_token_ids: np.ndarray | list[int], n: int) -> list[int]:
        prompt = [int(token) for token in prompt_token_ids]
        if n < 1:
            raise PromptError(f"n is {n}; allowed: at least 1")
        if not prompt:
            raise PromptError("the prompt has no tokens; at least 1 is needed")
        if len(prompt) >= self.max_model_len:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens; allowed: at most {self.max_model_len - 1}, "
                f"as the model's context of {self.max_model_len} must hold the completion too"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self._vocab_size)
            raise PromptError(f"the prompt holds token id {wrong}; allowed: 0 to {self._vocab_size - 1}")
        return prompt

    # ----------------------------------------------------------------- pause

    async def pause(self, mode: PauseMode, keep_kv_cache: bool = False) -> int:
        drained: Future[None] = Future()
        try:
            count = await self._call(self._pause, mode, keep_kv_cache, drained)
            await asyncio.wrap_future(drained)
        except asyncio.CancelledError:
            if not self._closed:
                self._commands.put(self._resume)
            raise
        return count

    async def resume(self) -> None:
        await self._call(self._resume)

    # --------------------------------------------------------------- weights

    async def install_weights(self, policy_version: int) -> None:
        await self._call(self._install, policy_version)

    async def invalidate(self) -> None:
        await self._call(self._set_version, UNKNOWN_VERSION)

    # ------------------------------------------------- on the engine's thread

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function on the engine's thread, between two steps."""
        if self._closed or self._thread is None:
            raise EngineError("the engine is closed" if self._closed else "the engine has not been started")
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:
                    raise self._failure
                result = function(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    def _run(self, started: Future[tuple[int, int]]) -> None:
        try:
            self._core = self._build()
        except EngineError as error:
            started.set_exception(error)
            return
        except Exception as error:
            started.set_exception(EngineError(f"the {self.name} engine did not start: {error}"))
            log.exception("the engine did not start")
            return
        started.set_result((self._core.max_model_len, self._core.vocab_size))
        while not self._stop:
            self._run_commands(wait=not self._can_step())
            if self._can_step() and not self._stop:
                try:
                    self._deliver(self._core.step())
                except Exception as error:
                    log.exception("the engine failed")
                    self._fail(EngineError(f"the {self.name} engine failed: {error}"))
            if self._state is _State.DRAINING and not self._rows:
                self._settle()
            self._publish_stats()
        self._core.close()

    def _run_commands(self, wait: bool) -> None:
        if wait:
            self._commands.get()()
        with suppress(queue.Empty):
            while not self._stop:
                self._commands.get_nowait()()

    def _can_step(self) -> bool:
        return bool(self._rows) and self._state is not _State.PAUSED and self._failure is None

    def _admit(self, request: _Request) -> None:
        if request.request_id in self._requests:
            raise EngineError(f"request '{request.request_id}' is running already")
        self._requests[request.request_id] = request
        for index in range(request.n):
            key = f"{request.request_id}/{index}"
            request.unfinished.add(key)
            if self._state is _State.RUNNING:
                self._add(key, request, index)
            else:
                self._parked.append((key, request, index))

    def _add(self, key: str, request: _Request, index: int) -> None:
        assert self._core is not None
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index)
        self._core.add(key, request.prompt, sampling)
        self._rows[key] = _Row(request, index, [(self.policy_version, 0)])

    def _abort(self, request_id: str, expected: _Request | None) -> None:
        """End a request; `expected` guards against another that has taken the id since."""
        request = self._requests.get(request_id)
        if request is None or (expected is not None and request is not expected):
            return
        self._abort_keys(list(request.unfinished))

    def _abort_keys(self, keys: list[str]) -> None:
        assert self._core is not None
        chosen = set(keys)
        ended = list(self._core.abort([key for key in keys if key in self._rows]))
        waiting = [item for item in self._parked if item[0] in chosen]
        self._parked = deque(item for item in self._parked if item[0] not in chosen)
        for key, request, index in waiting:
            self._rows[key] = _Row(request, index, [(self.policy_version, 0)])
            ended.append(CoreCompletion(key, np.empty(0, np.int32), np.empty(0, np.float32), "abort"))
        self._deliver(ended)

    def _deliver(self, ended: Iterable[CoreCompletion]) -> None:
        batch: list[tuple[_Request, EngineCompletion]] = []
        for completion in ended:
            row = self._rows.pop(completion.key)
            length = len(completion.token_ids)
            self._finished_tokens += length
            request = row.request
            request.unfinished.discard(completion.key)
            if not request.unfinished:
                self._requests.pop(request.request_id, None)
            batch.append(
                (
                    request,
                    EngineCompletion(
                        index=row.index,
                        token_ids=completion.token_ids,
                        log_probs=completion.log_probs,
                        finish_reason=completion.finish_reason,
                        version_spans=_spans(row.versions, length),
                    ),
                )
            )
        if batch:
            self._publish_stats()  # Before anybody hears of it.
            self._send(batch)

    def _send(self, batch: list[tuple[_Request, Any]]) -> None:
        def put() -> None:
            for request, item in batch:
                request.outbox.put_nowait(item)

        assert self._loop is not None
        with suppress(RuntimeError):  # The event loop is closed: nobody is left to read.
            self._loop.call_soon_threadsafe(put)

    def _pause(self, mode: PauseMode, keep_kv_cache: bool, drained: Future[None]) -> int:
        self._keep_kv_cache = keep_kv_cache
        count = len(self._rows)
        if mode == "abort":
            self._abort_keys(list(self._rows))
        if mode == "wait" and self._rows and self._state is not _State.PAUSED:
            self._state = _State.DRAINING
            self._drained.append(drained)
        else:
            self._drained.append(drained)
            self._settle()
        return count

    def _settle(self) -> None:
        self._state = _State.PAUSED
        drained, self._drained = self._drained, []
        for future in drained:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _resume(self) -> None:
        if self._drained:
            self._settle()
        self._state = _State.RUNNING
        self._keep_kv_cache = False
        while self._parked:
            self._add(*self._parked.popleft())

    def _install(self, policy_version: int) -> None:
        assert self._core is not None
        tensors = self.receiver.tensors()
        try:
            self._core.install(tensors)
            if not self._keep_kv_cache:
                self._core.reset_kv_cache()
        except Exception as error:
            self._set_version(UNKNOWN_VERSION)
            log.exception("weights could not be installed", extra={"policy_version": policy_version})
            raise WeightInstallError(f"weights of version {policy_version} could not be installed: {error}") from error
        self.receiver.discard()
        self._set_version(policy_version)

    def _set_version(self, policy_version: int) -> None:
        assert self._core is not None
        self.policy_version = policy_version
        for key, length in self._core.lengths().items():
            self._rows[key].versions.append((policy_version, length))

    def _fail(self, failure: EngineError) -> None:
        self._failure = failure
        self.policy_version = UNKNOWN_VERSION
        self._send([(request, failure) for request in self._requests.values()])
        self._requests.clear()
        self._rows.clear()
        self._parked.clear()
        for future in self._drained:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
        self._drained = []

    def _close(self) -> None:
        if self._failure is None:
            self._abort_keys([key for request in self._requests.values() for key in request.unfinished])
        self._stop = True

    def _publish_stats(self) -> None:
        assert self._core is not None
        if self._failure is not None:
            self._stats = EngineStats(0, 0, -1.0, self._finished_tokens)
            return
        lengths = self._core.lengths()
        running = self._core.running()
        self._stats = EngineStats(
            running=running,
            waiting=len(lengths) - running + len(self._parked),
            kv_cache_use=self._core.kv_cache_use(),
            tokens_total=self._finished_tokens + sum(lengths.values()),
        )


def _spans(versions: list[tuple[int, int]], length: int) -> tuple[tuple[int, int, int], ...]:
    """(version, begin, end) from the (version, begin) at which versions changed, empty ones left out, equal
    neighbours joined."""
    spans: list[tuple[int, int, int]] = []
    ends = [begin for _, begin in versions[1:]] + [length]
    for (version, begin), end in zip(versions, ends, strict=True):
        if begin == end:
            continue
        if spans and spans[-1][0] == version:
            begin = spans.pop()[1]
        spans.append((version, begin, end))
    return tuple(spans)
