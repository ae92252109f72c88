"""A core in a process of its own: neither waits for the other's Python.

On a CPU a step of a small model is mostly Python, and so is what the service does around it; in one interpreter they
would take turns. The process steps the core as a thread would (`Runner`), and only what has ended comes over.
"""

from __future__ import annotations

import itertools
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from quartet_common.log import get_logger
from quartet_rollout.engines.base import UNKNOWN_VERSION, EngineError, EngineStats
from quartet_rollout.engines.runner import Facts
from quartet_rollout.engines.stepping import Mail
from quartet_rollout.engines.wire import Channel, pack_requests, unpack_error, unpack_mail

if TYPE_CHECKING:
    import torch

    from quartet_rollout.engines.arena import Arena

log = get_logger(__name__)

END_SECONDS = 5.0
"""How long a process that speaks no more may take to end by itself."""


class ProcessHost:
    """`Host` over a child process, which ends when this one does."""

    def __init__(self, name: str, model_path: str, options: BaseModel) -> None:
        """`options` are those of the transformers engine, whose core the process builds."""
        self._name, self._model_path, self._options = name, model_path, options
        self.stats = EngineStats(0, 0, -1.0, 0)
        self.policy_version = UNKNOWN_VERSION
        self.failure = ""
        self._process: subprocess.Popen[bytes]
        self._channel: Channel
        self._deliver: Callable[[list[Mail]], None]
        self._lost: Callable[[EngineError], None]
        self._started: Future[Facts] = Future()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # Guards the two below.
        self._asked: dict[int, Future[Any]] = {}
        self._gone: EngineError | None = None
        self._arena: Arena | None = None
        self._staged: dict[str, Any] = {}

    def start(self, deliver: Callable[[list[Mail]], None], lost: Callable[[EngineError], None]) -> Future[Facts]:
        """See `Host.start`."""
        self._deliver, self._lost = deliver, lost
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "quartet_rollout.engines.child", str(theirs.fileno())]
            # A group of its own: Ctrl-C in a terminal is for the rollout, which drains first.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0)
        self._channel = Channel(ours.detach())
        self._channel.send(
            {
                "engine": self._name,
                "model_path": self._model_path,
                "options": self._options.model_dump(mode="json"),
                "log_level": logging.getLogger().getEffectiveLevel(),
            }
        )
        threading.Thread(target=self._read, name=f"engine-{self._name}", daemon=True).start()
        return self._started

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """See `Host.ask`."""
        answer: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._gone is not None:
                answer.set_exception(self._gone)
                return answer
            self._asked[number] = answer
        arguments, arrays = pack_requests(args[0]) if method == "admit" else (list(args), [])
        try:
            self._channel.send({"ask": number, "method": method, "args": arguments}, arrays)
        except OSError:
            log.debug("the engine's process is gone")  # The reading thread finds out why, and answers.
        return answer

    def stage(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See `Host.stage`."""
        from quartet_rollout.engines.arena import Arena

        if self._arena is None:
            self._arena = Arena()
        self._staged = self._arena.put(tensors)

    def install(self, tensors: Iterator[tuple[str, torch.Tensor]], policy_version: int) -> Future[None]:
        """See `Host.install`."""
        return self.ask("install", self._staged, policy_version)

    def close(self, seconds: float) -> bool:
        """See `Host.close`. What has not ended by then is killed."""
        try:
            self._channel.send({"close": True})
        except OSError:
            log.debug("the engine's process has ended before it was closed")
        try:
            self._process.wait(seconds)
            in_time = True
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            in_time = False
        if self._arena is not None:
            self._arena.close()
        return in_time

    # ---------------------------------------------------- on the reading thread

    def _read(self) -> None:
        try:
            while True:
                self._take(*self._channel.receive())
        except (EOFError, OSError):
            self._end()
        except Exception:
            log.exception("what the engine's process says cannot be understood")
            self._process.kill()
            self._end()

    def _take(self, body: dict[str, Any], arrays: list[Any]) -> None:
        if (line := body.get("log")) is not None:
            logging.getLogger(line[0]).log(line[1], "%s", line[2])
            return
        if "stats" in body:  # Before anybody hears of the rest.
            self.stats, self.policy_version = EngineStats(*body["stats"]), body["version"]
        if "mail" in body:
            self._deliver(unpack_mail(body["mail"], arrays))
        elif "answer" in body:
            with self._lock:
                answer = self._asked.pop(body["answer"])
            if "failed" in body:
                answer.set_exception(unpack_error(body["failed"]))
            else:
                answer.set_result(body["result"])
        elif "started" in body:
            self._started.set_result(Facts(**body["started"]))
        elif "failed" in body:
            self._started.set_exception(unpack_error(body["failed"]))

    def _end(self) -> None:
        """The process has ended, or is about to: tell everybody who waits."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        gone = EngineError(f"the {self._name} engine failed: its process ended with {how}")
        with self._lock:
            self._gone = gone
            asked, self._asked = self._asked, {}
        if code:
            self.failure = str(gone)
            log.error("the engine's process ended", extra={"how": how})
        self.policy_version = UNKNOWN_VERSION
        self.stats = EngineStats(0, 0, -1.0, self.stats.tokens_total)
        for answer in asked.values():
            answer.set_exception(gone)
        if not self._started.done():
            self._started.set_exception(
                EngineError(f"the {self._name} engine did not start: its process ended with {how}")
            )
        self._lost(gone)
        self._channel.close()
