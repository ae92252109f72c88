"""An engine from a core: the core lives on a daemon thread, which runs commands of the event loop between its steps."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
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
    SleepLevel,
    check_prompt,
)
from quartet_rollout.engines.core import Core
from quartet_rollout.engines.stepping import Mail, Request, Stepping
from quartet_rollout.engines.weight_updates import WeightUpdates, result_of

if TYPE_CHECKING:
    from quartet_rollout.weights.manifest import ModelSpec

log = get_logger(__name__)
T = TypeVar("T")

CLOSE_SECONDS = 10.0
"""How long `close` waits for the thread: a step in progress cannot be interrupted."""


class ThreadedEngine(WeightUpdates):
    """`Engine` over a `Core`. `build` makes the core, on the engine's thread, and may raise EngineError."""

    weight_ranks = 1

    def __init__(
        self,
        name: str,
        build: Callable[[], Core],
        load_tokenizer: Callable[[], Any],
        load_spec: Callable[[], ModelSpec],
    ) -> None:
        super().__init__(load_spec)
        self.name = name
        self.max_model_len = 0
        self._vocab_size = 0
        self._gives_masks = self._can_sleep = False
        self._build, self._load_tokenizer = build, load_tokenizer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tokenizer: Any = None
        self._thread: threading.Thread | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed = False
        # Below: changed by the engine's thread alone.
        self._stepping: Stepping | None = None
        self._failure: EngineError | None = None
        self._stop = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        if self._thread is not None:
            raise EngineError("the engine has been started already")
        self._loop = asyncio.get_running_loop()
        started: Future[Core] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"engine-{self.name}", daemon=True)
        self._thread.start()
        core = await result_of(started)
        self.max_model_len, self._vocab_size = core.max_model_len, core.vocab_size
        self._gives_masks, self._can_sleep = core.gives_masks, core.can_sleep
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

    @property
    def policy_version(self) -> int:
        return self._stepping.policy_version if self._stepping is not None else UNKNOWN_VERSION

    def tokenizer(self) -> Any:
        return self._tokenizer

    def stats(self) -> EngineStats:
        return self._stepping.stats if self._stepping is not None else EngineStats(0, 0, -1.0, 0)

    def capabilities(self) -> list[str]:
        masks = ["sampling_masks"] if self._gives_masks else []
        sleep = ["sleep"] if self._can_sleep else []
        return [*self.weight_capabilities(), *masks, *sleep]

    # -------------------------------------------------------------- requests

    async def generate(
        self, request_id: str, prompt_token_ids: np.ndarray | list[int], n: int, sampling: SamplingSettings
    ) -> AsyncIterator[EngineCompletion]:
        prompt = check_prompt(prompt_token_ids, n, self.max_model_len, self._vocab_size)
        if sampling.masks and not self._gives_masks:
            raise PromptError("sampling.masks is true; allowed: false, as this engine cannot tell the candidates")
        request = Request(request_id, prompt, n, sampling)
        left = n
        try:
            await self._call(lambda stepping: stepping.admit(request))
            while left:
                item = await request.outbox.get()
                if isinstance(item, EngineError):
                    raise item
                left -= 1
                yield item
        finally:
            # Whoever stops reading, for whatever reason, wants no more; a cancelled admission may still take place.
            if left:
                self._post(lambda stepping: stepping.abort(request_id, request))

    async def abort(self, request_id: str) -> None:
        await self._call(lambda stepping: stepping.abort(request_id))

    # ----------------------------------------------------------------- pause

    async def pause(self, mode: PauseMode, keep_kv_cache: bool = False) -> int:
        paused: Future[None] = Future()
        try:
            count = await self._call(lambda stepping: stepping.pause(mode, keep_kv_cache, paused))
            await asyncio.wrap_future(paused)
        except asyncio.CancelledError:
            self._post(Stepping.resume)
            raise
        return count

    async def resume(self) -> None:
        await self._call(Stepping.resume)

    # ----------------------------------------------------------------- sleep

    async def sleep(self, level: SleepLevel = 1) -> None:
        await self._call(lambda stepping: stepping.sleep(level))

    async def wake(self) -> None:
        await self._call(Stepping.wake)

    # --------------------------------------------------------------- weights

    async def install_weights(self, policy_version: int) -> None:
        tensors = self.received_tensors()
        await self._call(lambda stepping: stepping.install(tensors, policy_version))
        await self.discard_weights()

    async def invalidate(self) -> None:
        await self._call(lambda stepping: stepping.set_version(UNKNOWN_VERSION))

    # ------------------------------------------------- on the engine's thread

    async def _call(self, function: Callable[[Stepping], T]) -> T:
        """Run a function on the engine's thread, between two steps. Raises EngineError when there is no such thread."""
        if self._closed or self._thread is None:
            raise EngineError("the engine is closed" if self._closed else "the engine has not been started")
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:
                    raise self._failure
                assert self._stepping is not None
                result = function(self._stepping)
            except EngineError as error:
                future.set_exception(error)
            except Exception as error:
                future.set_exception(self._fail(error))
            else:
                future.set_result(result)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    def _post(self, function: Callable[[Stepping], object]) -> None:
        """As `_call`, without waiting; nothing happens when the engine has failed or is closed."""

        def command() -> None:
            if self._failure is None and self._stepping is not None:
                function(self._stepping)

        if not self._closed:
            self._commands.put(command)

    def _run(self, started: Future[Core]) -> None:
        try:
            core = self._build()
        except EngineError as error:
            started.set_exception(error)
            return
        except Exception as error:
            log.exception("the engine did not start")
            started.set_exception(EngineError(f"the {self.name} engine did not start: {error}"))
            return
        self._stepping = stepping = Stepping(core, self._deliver)
        started.set_result(core)
        while not self._stop:
            try:
                self._run_commands(wait=self._failure is not None or not stepping.can_step())
                if self._failure is None and not self._stop and stepping.can_step():
                    stepping.step()
            except Exception as error:
                self._fail(error)
        core.close()

    def _fail(self, error: Exception) -> EngineError:
        """The core is lost: tell everybody who waits. Returns what they are told."""
        log.exception("the engine failed")
        self._failure = EngineError(f"the {self.name} engine failed: {error}")
        if self._stepping is not None:
            self._stepping.fail(self._failure)
        return self._failure

    def _run_commands(self, wait: bool) -> None:
        """Run what has come; `wait` for something first."""
        if wait:
            self._commands.get()()
        with suppress(queue.Empty):
            while not self._stop:
                self._commands.get_nowait()()
        if self._failure is None and self._stepping is not None:
            self._stepping.publish_stats()

    def _close(self) -> None:
        if self._failure is None and self._stepping is not None:
            self._stepping.abort_all()
        self._stop = True

    def _deliver(self, mail: list[Mail]) -> None:
        def put() -> None:
            for request, item in mail:
                request.outbox.put_nowait(item)

        assert self._loop is not None
        with suppress(RuntimeError):  # The event loop is closed: nobody is left to read.
            self._loop.call_soon_threadsafe(put)
