"""The process of the transformers engine.

It steps the decoder, and executes the rollout's calls between two steps, when every completion is between two tokens.
That makes an in-flight update exact.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from quartet_common.log import get_logger
from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    EngineCompletion,
    EngineStats,
    FinishReason,
    PauseMode,
    SamplingSettings,
)
from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.transformers_engine.decoder import Decoder
from quartet_rollout.engines.transformers_engine.messages import (
    EngineAnswer,
    EngineCall,
    EnginePipe,
    Failed,
    Log,
    Output,
    Ready,
)
from quartet_rollout.engines.transformers_engine.sequences import EngineSequence
from quartet_rollout.engines.weight_group import ModelSpec
from quartet_rollout.errors import EngineError, WeightInstallError, pack_error
from quartet_rollout.weight_sync.receiver import WeightReceiver, transports

log = get_logger(__name__)

STATS_SECONDS = 0.02
"""Least interval between two messages that contain only statistics."""


class EngineLoop:
    """The decoder's steps, pauses, sleep and policy versions. An `EngineCall` names a method before `close`."""

    def __init__(self, decoder: Decoder, receiver: WeightReceiver, channel: EnginePipe) -> None:
        self.policy_version = UNKNOWN_VERSION
        self._decoder, self._receiver, self._channel = decoder, receiver, channel
        self._draining: list[EngineAnswer] = []
        """Answers to pauses of mode "wait", sent when all running completions have finished; no new ones begin."""
        self._paused = self._asleep = self._closed = False
        self._keep_kv_cache = False
        self._completions: list[tuple[int, EngineCompletion]] = []
        self._answers: list[EngineAnswer] = []
        self._ended_tokens = 0
        self._sent: tuple[EngineStats, int] | None = None
        self._sent_at = 0.0

    def run(self) -> None:
        """Run until `close` is called. Raises EOFError or ConnectionError when the rollout is gone."""
        while not self._closed:
            if self._draining and not self._decoder.running:
                self._enter_pause()
            if not self._can_step:
                self._report(at_once=True)
                self._execute(self._channel.receive())
            while self._channel.poll():
                self._execute(self._channel.receive())
            self._report(at_once=False)  # before the step, so that answers do not wait for it
            if self._can_step:
                self._end(self._decoder.step(admit=not self._draining))
        self._report(at_once=True)

    @property
    def _can_step(self) -> bool:
        return not self._paused and not self._asleep and not self._closed and self._decoder.busy

    def _execute(self, calls: list[EngineCall]) -> None:
        for call in calls:
            answer = EngineAnswer(call.number)
            try:
                answer.result = getattr(self, call.method)(*call.args)
            except EngineError as error:
                answer.error = pack_error(error)
            # A pause of mode "wait" is answered when running completions have finished.
            pending = call.method == "pause" and not self._paused
            (self._draining if pending else self._answers).append(answer)

    def _report(self, at_once: bool) -> None:
        """Send completions and answers if there are any; statistics alone only every `STATS_SECONDS`, or `at_once`."""
        news = self._completions or self._answers
        now = time.monotonic()
        if not (news or at_once or now >= self._sent_at + STATS_SECONDS):
            return
        decoder = self._decoder
        tokens = self._ended_tokens + decoder.tokens
        stats = EngineStats(decoder.running, decoder.waiting, kv_cache_use=-1.0, tokens_total=tokens)
        if news or (stats, self.policy_version) != self._sent:
            self._channel.send(Output(stats, self.policy_version, self._completions, self._answers))
            self._completions, self._answers = [], []
            self._sent, self._sent_at = (stats, self.policy_version), now

    # ----------------------------------------------------------------- calls

    def generate(self, request: int, prompt: list[int], n: int, sampling: dict[str, Any]) -> None:
        """Queue a request; its completions are reported as they end. `sampling`: fields of `SamplingSettings`."""
        settings = SamplingSettings(**sampling)
        for index in range(n):
            self._decoder.add(EngineSequence(request, index, prompt, settings, self.policy_version))

    def abort(self, request: int) -> None:
        """Abort a request."""
        self._abort(row for row in self._decoder.rows if row.number == request)

    def log_probs(self, tokens: list[int], begin: int) -> list[float]:
        """Return the log-prob of each token from `begin` on."""
        return self._decoder.log_probs(tokens, begin)

    def pause(self, mode: PauseMode, keep_kv_cache: bool) -> None:
        """Pause; with "wait", stop admitting new completions."""
        self._keep_kv_cache = keep_kv_cache
        if mode == "abort":
            self._abort(row for row in self._decoder.rows if row.output)
        if mode != "wait" or not self._decoder.running:
            self._enter_pause()

    def resume(self) -> None:
        """End any pause, pending ones included."""
        self._enter_pause()  # answers pending pauses
        self._paused = self._keep_kv_cache = False

    def sleep(self) -> None:
        """Free the accelerator's memory."""
        self._decoder.sleep()
        self._asleep = True

    def wake(self) -> None:
        """Move the model back to the accelerator, and continue unless paused."""
        self._decoder.wake()
        self._asleep = False

    def weights(self, method: str, *args: Any) -> Any:
        """Call a method of the `WeightReceiver`."""
        return getattr(self._receiver, method)(*args)

    def install(self, policy_version: int) -> None:
        """Install the received weights. Raises WeightInstallError, after which the version is unknown; EngineError when
        nothing was received."""
        tensors = self._receiver.tensors()
        try:
            self._decoder.install(tensors)
            if not self._keep_kv_cache:
                self._decoder.reset_kv_cache()
        except Exception as error:
            self.set_version(UNKNOWN_VERSION)
            raise WeightInstallError(f"weights of version {policy_version} could not be installed: {error}") from error
        self.set_version(policy_version)
        self._receiver.discard()

    def set_version(self, policy_version: int) -> None:
        """Assign this version to every token from now on."""
        self.policy_version = policy_version
        for row in self._decoder.rows:
            row.versions.append((policy_version, len(row.output)))

    def close(self) -> None:
        """Abort every request and end `run`."""
        self._abort(self._decoder.rows)
        self._closed = True

    # --------------------------------------------------------------- helpers

    def _enter_pause(self) -> None:
        """Pause, and answer pending pauses."""
        self._paused = True
        self._answers += self._draining
        self._draining = []

    def _abort(self, rows: Iterable[EngineSequence]) -> None:
        chosen = list(rows)
        self._decoder.remove(chosen)
        self._end((row, "abort") for row in chosen)

    def _end(self, ended: Iterable[tuple[EngineSequence, FinishReason]]) -> None:
        for row, reason in ended:
            self._ended_tokens += len(row.output)
            self._completions.append((row.number, row.completion(reason)))


class _ToTheRollout(logging.Handler):
    """Forwards log records to the rollout, which logs them in its format."""

    def __init__(self, channel: EnginePipe) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(ConnectionError):
            self._channel.send(Log(record.name, record.levelno, self.format(record)))


def main(model_path: str, options: str, log_level: str, *, descriptor: int = 0) -> None:
    """Load the model and serve the rollout at the other end of a socket, standard input unless the process is forked.
    Does not return."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The rollout drains, then closes this process.
    channel = EnginePipe(descriptor)
    root = logging.getLogger()
    root.handlers = [_ToTheRollout(channel)]  # a fork has the rollout's
    root.setLevel(int(log_level))
    what, status = "did not start", 1
    with suppress(EOFError, ConnectionError):  # The rollout is gone.
        try:
            decoder = Decoder(model_path, TransformersOptions.model_validate_json(options))
            gc.freeze()
            gc.enable()
            spec, routed = ModelSpec.of_model(decoder.model), decoder.routing is not None
            tokenizer = type(decoder.tokenizer).__module__, type(decoder.tokenizer).__name__
            channel.send(Ready(decoder.max_model_len, decoder.vocab_size, tokenizer, spec, transports(), routed))
            what = "failed"
            EngineLoop(decoder, WeightReceiver(model_path), channel).run()
            status = 0
        except EngineError as error:
            channel.send(Failed(str(error)))
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            log.exception("the engine %s", what)
            channel.send(Failed(f"the transformers engine {what}: {error}"))
    sys.stderr.flush()
    os._exit(status)  # Skips interpreter shutdown, which is unsafe while torch's threads run.
