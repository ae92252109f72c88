"""The transformers engine in the rollout's event loop. The model runs in a child process (`engine_loop`).

On a CPU a step of a small model is mostly Python, as is the service around it; in one interpreter they would compete
for the GIL. The child process itself is the member of the weight group, and sends only finished completions.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quartet_common.log import get_logger
from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    EngineCompletion,
    EngineStats,
    PauseMode,
    SamplingSettings,
    SleepLevel,
)
from quartet_rollout.engines.forking import ForkedProcess
from quartet_rollout.engines.model_folder import load_tokenizer
from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.process_engine import ProcessEngine
from quartet_rollout.engines.transformers_engine.messages import (
    EngineCall,
    Failed,
    Log,
    Output,
    Ready,
    Report,
    frame,
    read_report,
)
from quartet_rollout.errors import EngineError, unpack_error

log = get_logger(__name__)

PROGRAM = "quartet_rollout.engines.transformers_engine"
CLOSE_SECONDS = 10.0
"""How long `close` waits for the process to end: a step in progress cannot be interrupted."""
END_SECONDS = 5.0
"""How long the process may take to exit after it has closed its socket, before it is killed."""


_forked: list[tuple[ForkedProcess, socket.socket]] = []
"""The process of the first engine, and the socket to it."""


def fork(model_path: str, options: TransformersOptions) -> None:
    """Fork the process of this rollout's engine, which begins to load."""
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = model_path, options.model_dump_json(), str(logging.getLogger().getEffectiveLevel())
        _forked.append((ForkedProcess(target=_serve, args=(ours, theirs, *arguments)), ours))


def _serve(ours: socket.socket, theirs: socket.socket, *arguments: str) -> None:
    ours.close()
    os.setpgid(0, 0)  # as in `_execute`
    Path("/proc/self/comm").write_text("transformers")
    engine_loop = importlib.import_module("quartet_rollout.engines.transformers_engine.engine_loop")
    engine_loop.main(*arguments, descriptor=theirs.fileno())


class TransformersEngine(ProcessEngine):
    """`Engine` over a child process, which exits when this process does."""

    name = "transformers"
    weight_ranks = 1

    def __init__(self, model_path: str, options: TransformersOptions) -> None:
        super().__init__(model_path)
        self._options = options
        self._process: asyncio.subprocess.Process | ForkedProcess
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready]
        self._stats = EngineStats(0, 0, -1.0, 0)
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outboxes: dict[int, asyncio.Queue[EngineCompletion | EngineError]] = {}
        self._unfinished: dict[int, int] = {}
        """Completions that the process has not ended, by request: it may not have reported that it has them."""
        self._unsent: list[EngineCall] = []

    # -------------------------------------------------------- start and close

    async def start(self) -> None:
        self._begin()
        self._ready = asyncio.get_running_loop().create_future()
        self._process, ours = _forked.pop() if _forked else await self._execute()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        ready, _ = await asyncio.gather(self._ready, asyncio.to_thread(importlib.import_module, "transformers"))
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._model_path, ready.tokenizer)
        self._spec, self._transports, self._vocab_size = ready.spec, ready.transports, ready.vocab_size
        self._started = True

    async def _execute(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            level = str(logging.getLogger().getEffectiveLevel())
            command = [sys.executable, "-m", PROGRAM, self._model_path, self._options.model_dump_json(), level]
            # A process group of its own: Ctrl-C in a terminal reaches only the rollout, which drains first.
            return await asyncio.create_subprocess_exec(*command, stdin=theirs.fileno(), process_group=0), ours

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._reading is None:
            return
        self._send("close")
        try:
            if (await asyncio.wait({self._reading}, timeout=CLOSE_SECONDS))[0]:
                return
            log.warning("the engine did not end in time", extra={"seconds": CLOSE_SECONDS})
        finally:  # also when this is cancelled: a stopped process would outlive the rollout
            if not self._reading.done():
                self._process.kill()
        await asyncio.wait({self._reading})

    @property
    def max_model_len(self) -> int:
        return self._ready.result().max_model_len

    def stats(self) -> EngineStats:
        stats = self._stats
        return replace(stats, waiting=max(stats.waiting, sum(self._unfinished.values()) - stats.running))

    def capabilities(self) -> list[str]:
        routed = ["routed_experts"] if self._ready.result().records_experts else []
        return [*self.weight_capabilities(), "sampling_masks", *routed, "sleep", "log_probs"]

    # -------------------------------------------------------------- requests

    async def generate(
        self, request_id: str, prompt_token_ids: np.ndarray | list[int], n: int, sampling: SamplingSettings
    ) -> AsyncGenerator[EngineCompletion, None]:
        prompt = self._check_request(prompt_token_ids, n, sampling)
        number = next(self._numbers)
        outbox = self._outboxes[number] = asyncio.Queue()
        self._unfinished[number] = n
        self._send("generate", number, prompt, n, sampling.model_dump())
        left = n
        try:
            while left:
                item = await outbox.get()
                if isinstance(item, EngineError):
                    raise item
                left -= 1
                yield item
        finally:
            del self._outboxes[number], self._unfinished[number]
            if left:
                self._send("abort", number)

    async def log_probs(self, request_id: str, token_ids: list[int], begin: int) -> np.ndarray:
        tokens = self._check_request(token_ids, 1, SamplingSettings())
        return np.array(await self._call("log_probs", tokens, begin), dtype=np.float32)

    # ------------------------------------------------------- pause and sleep

    async def pause(self, mode: PauseMode, keep_kv_cache: bool = False) -> None:
        try:
            await self._call("pause", mode, keep_kv_cache)
        except asyncio.CancelledError:
            self._send("resume")
            raise

    async def resume(self) -> None:
        await self._call("resume")

    async def _set_sleep(self, level: SleepLevel | None) -> None:
        await self._call("sleep" if level is not None else "wake")

    # --------------------------------------------------------------- weights

    async def call_members(self, method: str, *args: Any) -> list[Any]:
        return [await self._call("weights", method, *args)]

    async def install_weights(self, policy_version: int) -> None:
        self._check_usable(awake=True)
        await self._call("install", policy_version)

    async def set_version(self, policy_version: int) -> None:
        await self._call("set_version", policy_version)

    # ----------------------------------------------------------- the process

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of `EngineLoop`; return its result. Raises EngineError, e.g. when the process has ended."""
        self._check_usable()
        number = self._send(method, *args)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            del self._answers[number]

    def _send(self, method: str, *args: Any) -> int:
        """Call a method of `EngineLoop` without waiting; return the number of its answer. Calls made in one iteration
        of the event loop are sent together: the groups of a lease begin as one batch."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        number = next(self._numbers)
        self._unsent.append(EngineCall(number, method, args))
        return number

    def _flush(self) -> None:
        calls, self._unsent = self._unsent, []
        if not self._writer.is_closing():  # Else `_read` finds out why, and fails all pending calls.
            self._writer.write(frame(calls))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(await read_report(reader))
        except (asyncio.IncompleteReadError, OSError):
            log.debug("the engine's process has closed its socket")
        except msgspec.MsgspecError:
            log.exception("a message of the engine's process cannot be decoded")
            self._process.kill()
        finally:
            self._writer.close()
        await self._end()

    def _take(self, report: Report) -> None:
        match report:
            case Output():
                self._stats, self._version = report.stats, report.policy_version
                for number, completion in report.completions:
                    if (outbox := self._outboxes.get(number)) is not None:
                        self._unfinished[number] -= 1
                        outbox.put_nowait(completion)
                for answer in report.answers:
                    if (waiting := self._answers.get(answer.number)) is None or waiting.done():
                        continue  # The caller was cancelled.
                    if answer.error is None:
                        waiting.set_result(answer.result)
                    else:
                        waiting.set_exception(unpack_error(answer.error))
            case Log():
                logging.getLogger(report.logger).log(report.level, "%s", report.text)
            case Failed():
                self._failure = report.reason
            case Ready() if not self._ready.done():  # else `start` was cancelled
                self._ready.set_result(report)

    async def _end(self) -> None:
        """Wait for the process to exit, then fail all pending calls and requests."""
        try:
            async with asyncio.timeout(END_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            code = await self._process.wait()
        if not self._closed and not self._failure:
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            what = "failed" if self._ready.done() else "did not start"
            self._failure = f"the transformers engine {what}: its process ended with {how}"
            log.error("the engine's process ended", extra={"how": how})
        self._version = UNKNOWN_VERSION
        self._stats = EngineStats(0, 0, -1.0, self._stats.tokens_total)
        gone = EngineError(self._failure or "the engine is closed")
        for waiting in (self._ready, *self._answers.values()):
            if not waiting.done():
                waiting.set_exception(gone)
        for outbox in self._outboxes.values():
            outbox.put_nowait(gone)
