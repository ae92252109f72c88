"""The completions of a core between its steps: admission, pauses, ends, and which policy version made which token.

Synchronous and single-threaded: a `Runner` calls it on its thread, always between two steps, so each method sees every
completion between two tokens. That is what makes an update in flight exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    EngineCompletion,
    EngineError,
    EngineStats,
    PauseMode,
    SamplingSettings,
    SleepLevel,
    WeightInstallError,
)
from quartet_rollout.engines.core import Core, CoreCompletion

if TYPE_CHECKING:
    import torch


@dataclass
class Request:
    """A prompt whose completions are wanted."""

    number: int
    """Which request it is, of all there ever were: names may come again."""
    request_id: str
    prompt: list[int]
    n: int
    sampling: SamplingSettings
    unfinished: set[str] = field(default_factory=set)
    """Keys of the completions still to come."""


Mail = tuple[int, EngineCompletion | EngineError]
"""A completion, or the reason why none will come, for the request of that number."""


@dataclass
class _Row:
    """One completion of a request that is in the core."""

    request: Request
    index: int
    versions: list[tuple[int, int]]  # (policy version, first token), oldest first


class _State(Enum):
    RUNNING = "running"
    DRAINING = "draining"  # Paused with mode "wait": what runs is finished, nothing is added.
    PAUSED = "paused"


class Stepping:
    """A core and its requests. `deliver` takes what is for those who asked, after each step or command."""

    def __init__(self, core: Core, deliver: Callable[[list[Mail]], None]) -> None:
        self.core = core
        self.policy_version = UNKNOWN_VERSION
        self.stats = EngineStats(running=0, waiting=0, kv_cache_use=-1.0, tokens_total=0)
        self._deliver = deliver
        self._state = _State.RUNNING
        self._asleep: SleepLevel | None = None
        self._keep_kv_cache = False
        self._pausing: list[tuple[int, Future[int]]] = []  # What each is told, and where.
        self._requests: dict[str, Request] = {}
        self._rows: dict[str, _Row] = {}
        self._parked: deque[tuple[str, Request, int]] = deque()  # Come during a pause.
        self._ended_tokens = 0
        self._set_back = 0  # Running ones whose keys and values were forgotten; they run again with the next step.

    def can_step(self) -> bool:
        """Whether there is something to generate now."""
        return bool(self._rows) and not self._stands

    def step(self) -> None:
        """One token for each running completion."""
        self._set_back = 0
        published = self._end(self.core.step())
        if self._state is _State.DRAINING and not self._rows:
            self._pause()
        if not published:
            self.publish_stats()

    # -------------------------------------------------------------- requests

    def admit(self, requests: Sequence[Request]) -> None:
        """Take requests in; who asked for one that cannot be is told why."""
        refused: list[Mail] = []
        for request in requests:
            try:
                self._admit(request)
            except EngineError as error:
                refused.append((request.number, error))
        if refused:
            self._deliver(refused)

    def _admit(self, request: Request) -> None:
        """Raises EngineError when its id is running already."""
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

    def abort(self, request_id: str, number: int | None = None) -> None:
        """End a request; `number` guards against another one that has taken its id since."""
        request = self._requests.get(request_id)
        if request is not None and number in (None, request.number):
            self._abort(set(request.unfinished))

    def abort_all(self) -> None:
        """End every request."""
        self._abort({key for request in self._requests.values() for key in request.unfinished})

    def fail(self, failure: EngineError) -> None:
        """Tell everybody who waits that the core is lost."""
        self.policy_version = UNKNOWN_VERSION
        self.stats = EngineStats(0, 0, -1.0, self._ended_tokens)
        self._deliver([(request.number, failure) for request in self._requests.values()])
        self._requests.clear()
        self._rows.clear()
        self._parked.clear()
        pausing, self._pausing = self._pausing, []
        for _, future in pausing:
            future.set_exception(failure)

    # ----------------------------------------------------------------- pause

    def pause(self, mode: PauseMode, keep_kv_cache: bool) -> Future[int]:
        """Begin a pause. When it has come about, the result is how many completions were in the core."""
        self._keep_kv_cache = keep_kv_cache
        paused: Future[int] = Future()
        self._pausing.append((len(self._rows), paused))
        if mode == "abort":
            self._abort(set(self._rows))
        if mode == "wait" and self._rows and self._state is not _State.PAUSED:
            self._state = _State.DRAINING
        else:
            self._pause()
        return paused

    def resume(self) -> None:
        """End any pause, and one that is coming about."""
        stood, self._state = self._stands, _State.RUNNING
        self._tell_paused()
        if stood and not self._stands:
            self.core.go_on()
        self._keep_kv_cache = False
        while self._parked:
            self._add(*self._parked.popleft())

    # ----------------------------------------------------------------- sleep

    def sleep(self, level: SleepLevel) -> None:
        """Free the accelerator's memory. Raises EngineError where that cannot be done."""
        if self._asleep == level:
            return
        if self._asleep is not None:
            raise EngineError(f"the engine sleeps at level {self._asleep}; wake it first")
        if not self.core.can_sleep:
            raise EngineError("this engine cannot sleep; allowed: an engine on a GPU, vllm with sleep_mode = true")
        self._end(self.core.hold())
        self._set_back = max(self._set_back, self.core.running())
        self.core.sleep(level)
        self._asleep = level

    def wake(self) -> None:
        """Have the memory again, and go on unless there is a pause."""
        if self._asleep is None:
            return
        self.core.wake()
        level, self._asleep = self._asleep, None
        if level == 2:
            self.set_version(UNKNOWN_VERSION)
        if not self._stands:
            self.core.go_on()

    # --------------------------------------------------------------- weights

    def install(self, tensors: Iterator[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replace the weights. Raises WeightInstallError; the version is unknown then. Raises EngineError asleep."""
        if self._asleep is not None:
            raise EngineError("the engine sleeps: wake it before weights are installed")
        self._end(self.core.hold())
        try:
            self.core.install(tensors)
            if not self._keep_kv_cache:
                self._set_back = max(self._set_back, self.core.running())
                self.core.reset_kv_cache()
        except Exception as error:
            self.set_version(UNKNOWN_VERSION)
            raise WeightInstallError(f"weights of version {policy_version} could not be installed: {error}") from error
        finally:
            if not self._stands:
                self.core.go_on()
        self.set_version(policy_version)

    def set_version(self, policy_version: int) -> None:
        """Every token from now on is of this version."""
        self.policy_version = policy_version
        for key, length in self.core.lengths().items():
            self._rows[key].versions.append((policy_version, length))

    # --------------------------------------------------------------- helpers

    def publish_stats(self) -> None:
        """Make `stats` anew; other threads read it."""
        running = max(self.core.running(), min(self._set_back, len(self._rows)))
        self.stats = EngineStats(
            running=running,
            waiting=len(self._rows) - running + len(self._parked),
            kv_cache_use=self.core.kv_cache_use(),
            tokens_total=self._ended_tokens + self.core.tokens(),
        )

    def _add(self, key: str, request: Request, index: int) -> None:
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = sampling.model_copy(update={"seed": sampling.seed + index})
        self.core.add(key, request.prompt, sampling)
        self._rows[key] = _Row(request, index, [(self.policy_version, 0)])

    def _abort(self, keys: set[str]) -> None:
        ended = list(self.core.abort([key for key in keys if key in self._rows]))
        parked = [item for item in self._parked if item[0] in keys]
        self._parked = deque(item for item in self._parked if item[0] not in keys)
        for key, request, index in parked:
            self._rows[key] = _Row(request, index, [(self.policy_version, 0)])
            ended.append(CoreCompletion(key, np.empty(0, np.int32), np.empty(0, np.float32), "abort"))
        self._end(ended)

    def _end(self, ended: Iterable[CoreCompletion]) -> bool:
        """Tell of completions that ended; return whether there were any, and `stats` are new."""
        mail: list[Mail] = []
        for completion in ended:
            row = self._rows.pop(completion.key)
            length = len(completion.token_ids)
            self._ended_tokens += length
            row.request.unfinished.discard(completion.key)
            if not row.request.unfinished:
                self._requests.pop(row.request.request_id, None)
            finished = EngineCompletion(
                index=row.index,
                token_ids=completion.token_ids,
                log_probs=completion.log_probs,
                finish_reason=completion.finish_reason,
                version_spans=version_spans(row.versions, length),
                mask=completion.mask,
            )
            mail.append((row.request.number, finished))
        if mail:
            self.publish_stats()  # Before anybody hears of it.
            self._deliver(mail)
        return bool(mail)

    @property
    def _stands(self) -> bool:
        """Whether no tokens are generated now, whatever runs."""
        return self._state is _State.PAUSED or self._asleep is not None

    def _pause(self) -> None:
        self._end(self.core.hold())
        self._state = _State.PAUSED
        self.publish_stats()  # with the token of a step that was under way, before anybody hears of the pause
        self._tell_paused()

    def _tell_paused(self) -> None:
        pausing, self._pausing = self._pausing, []
        for count, future in pausing:
            future.set_result(count)


def version_spans(versions: list[tuple[int, int]], length: int) -> tuple[tuple[int, int, int], ...]:
    """(version, begin, end) from the (version, first token) at which versions changed; empty spans are left out, equal
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
