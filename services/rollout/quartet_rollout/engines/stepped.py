"""An engine from a core: its event-loop half. The core itself is stepped elsewhere, by a `Host`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

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
from quartet_rollout.engines.runner import Facts
from quartet_rollout.engines.stepping import Mail, Request
from quartet_rollout.engines.weight_updates import WeightUpdates, result_of

if TYPE_CHECKING:
    import torch
    from quartet.v1 import rollout_pb2

    from quartet_rollout.weights.manifest import ModelSpec

log = get_logger(__name__)

CLOSE_SECONDS = 10.0
"""How long `close` waits for the core to end: a step in progress cannot be interrupted."""


class Host(Protocol):
    """Where a core is stepped: on a thread, or in a process of its own."""

    @property
    def stats(self) -> EngineStats:
        """At least as new as all that was delivered or answered."""

    @property
    def policy_version(self) -> int:
        """As `stats`."""

    @property
    def failure(self) -> str:
        """Why the core is lost; "" while it is not."""

    def start(self, deliver: Callable[[list[Mail]], None], lost: Callable[[EngineError], None]) -> Future[Facts]:
        """Make the core; EngineError when that fails. `deliver` takes completions, on some thread; `lost` is told
        when no more will come for anybody."""

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of `Stepping` between two steps, in the order of the calls; see `Runner.ask`."""

    def stage(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Bring received weights to where they will be installed. Blocks; the tensors stay valid until then."""

    def install(self, tensors: Iterator[tuple[str, torch.Tensor]], policy_version: int) -> Future[None]:
        """Have the tensors installed that were staged last."""

    def close(self, seconds: float) -> bool:
        """End it; whether it has ended. Blocks so long at most."""


class SteppedEngine(WeightUpdates):
    """`Engine` over a core in a host."""

    weight_ranks = 1

    def __init__(
        self,
        name: str,
        host: Host,
        load_tokenizer: Callable[[], Any],
        load_spec: Callable[[], ModelSpec],
    ) -> None:
        super().__init__(load_spec)
        self.name = name
        self._host, self._load_tokenizer = host, load_tokenizer
        self._facts = Facts(0, 0, gives_masks=False, can_sleep=False)
        self._tokenizer: Any = None
        self._numbers = itertools.count(1)
        self._outboxes: dict[int, asyncio.Queue[EngineCompletion | EngineError]] = {}
        self._unsent: list[Request] = []
        self._begun = self._closed = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        if self._begun:
            raise EngineError("the engine has been started already")
        self._begun = True
        loop = asyncio.get_running_loop()

        def lost(reason: EngineError) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._lose, reason)

        self._facts = await result_of(self._host.start(partial(self._deliver, loop), lost))
        await self.load_spec()
        self._tokenizer = await asyncio.to_thread(self._load_tokenizer)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.leave_weight_group()
        if self._begun and not await asyncio.to_thread(self._host.close, CLOSE_SECONDS):
            log.warning("the engine did not end in time", extra={"seconds": CLOSE_SECONDS})

    @property
    def max_model_len(self) -> int:
        return self._facts.max_model_len

    @property
    def policy_version(self) -> int:
        return self._host.policy_version if self._begun else UNKNOWN_VERSION

    @property
    def failure(self) -> str:
        return self._host.failure

    def tokenizer(self) -> Any:
        return self._tokenizer

    def stats(self) -> EngineStats:
        return self._host.stats

    def capabilities(self) -> list[str]:
        masks = ["sampling_masks"] if self._facts.gives_masks else []
        sleep = ["sleep"] if self._facts.can_sleep else []
        return [*self.weight_capabilities(), *masks, *sleep]

    # -------------------------------------------------------------- requests

    async def generate(
        self, request_id: str, prompt_token_ids: np.ndarray | list[int], n: int, sampling: SamplingSettings
    ) -> AsyncGenerator[EngineCompletion, None]:
        prompt = check_prompt(prompt_token_ids, n, self._facts.max_model_len, self._facts.vocab_size)
        if sampling.masks and not self._facts.gives_masks:
            raise PromptError("sampling.masks is true; allowed: false, as this engine cannot tell the candidates")
        number = next(self._numbers)
        self._check_usable()
        outbox = self._outboxes[number] = asyncio.Queue()
        left = n
        try:
            self._admit(Request(number, request_id, prompt, n, sampling))
            while left:
                item = await outbox.get()
                if isinstance(item, EngineError):
                    raise item
                left -= 1
                yield item
        finally:
            del self._outboxes[number]
            # Whoever stops reading, for whatever reason, wants no more. It has been asked for by then: `_admit_all` was
            # in line before whatever woke this up.
            if left:
                self._post("abort", request_id, number)

    def _admit(self, request: Request) -> None:
        """Have a request admitted, together with the others that come before the event loop turns to other things: the
        groups of a lease begin as one batch, and cost one message."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._admit_all)
        self._unsent.append(request)

    def _admit_all(self) -> None:
        requests, self._unsent = self._unsent, []
        loop = asyncio.get_running_loop()

        def refused(error: EngineError) -> list[Mail]:
            return [(request.number, error) for request in requests]

        def admitted(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                assert isinstance(error, EngineError)  # `Host.ask` knows no other
                self._deliver(loop, refused(error))

        if self._closed:
            self._put(refused(EngineError("the engine is closed")))
        else:
            self._host.ask("admit", requests).add_done_callback(admitted)

    def _deliver(self, loop: asyncio.AbstractEventLoop, mail: list[Mail]) -> None:
        """On any thread."""
        with suppress(RuntimeError):  # The event loop is closed: nobody is left to read.
            loop.call_soon_threadsafe(self._put, mail)

    def _put(self, mail: list[Mail]) -> None:
        for number, item in mail:
            if (outbox := self._outboxes.get(number)) is not None:
                outbox.put_nowait(item)

    def _lose(self, reason: EngineError) -> None:
        for outbox in self._outboxes.values():
            outbox.put_nowait(reason)

    async def abort(self, request_id: str) -> None:
        await self._ask("abort", request_id)

    # ----------------------------------------------------------------- pause

    async def pause(self, mode: PauseMode, keep_kv_cache: bool = False) -> int:
        try:
            return await self._ask("pause", mode, keep_kv_cache)
        except asyncio.CancelledError:
            self._post("resume")
            raise

    async def resume(self) -> None:
        await self._ask("resume")

    # ----------------------------------------------------------------- sleep

    async def sleep(self, level: SleepLevel = 1) -> None:
        await self._ask("sleep", level)

    async def wake(self) -> None:
        await self._ask("wake")

    # --------------------------------------------------------------- weights

    async def receive_weights(
        self, manifest: rollout_pb2.WeightManifest, timeout_seconds: float, path: str = ""
    ) -> int:
        checksum = await super().receive_weights(manifest, timeout_seconds, path)
        await asyncio.to_thread(self._host.stage, self.received_tensors())
        return checksum

    async def install_weights(self, policy_version: int) -> None:
        tensors = self.received_tensors()
        self._check_usable()
        await result_of(self._host.install(tensors, policy_version))
        await self.discard_weights()

    async def set_version(self, policy_version: int) -> None:
        await self._ask("set_version", policy_version)

    async def invalidate(self) -> None:
        await self.set_version(UNKNOWN_VERSION)

    # --------------------------------------------------------------- helpers

    async def _ask(self, method: str, *args: Any) -> Any:
        """Have a method of `Stepping` called. Raises EngineError when there is nobody to call it."""
        self._check_usable()
        return await result_of(self._host.ask(method, *args))

    def _post(self, method: str, *args: Any) -> None:
        """As `_ask`, without waiting; nothing happens when the engine has failed or is closed."""
        if not self._closed:
            self._host.ask(method, *args).add_done_callback(lambda done: done.exception())

    def _check_usable(self) -> None:
        if self._closed or not self._begun:
            raise EngineError("the engine is closed" if self._closed else "the engine has not been started")
