"""The state of the training: phases, steps, the last metrics. Thread-safe."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from quartet.v1 import trainer_pb2

from quartet_common import tracing
from quartet_server import metrics

METRICS_KEPT = 1000

_PHASE_SECONDS = metrics.counter("quartet_trainer_phase_seconds_total", "Time spent in each phase.", ["run", "phase"])
_PHASE = metrics.gauge(
    "quartet_trainer_phase", "1 for the phase that the trainer is in, 0 for others.", ["run", "phase"]
)
_STEP = metrics.gauge("quartet_trainer_step", "Optimizer steps in the weights.", ["run"])
_CHECKPOINT_TIME = metrics.gauge(
    "quartet_trainer_checkpoint_timestamp_seconds",
    "When the newest checkpoint was saved, in seconds since the epoch; before the first, when the training began.",
    ["run"],
)
_METRIC = metrics.gauge(
    "quartet_trainer_metric", "The last step's metrics, as docs/metrics.md names them.", ["run", "name"]
)

Phase = trainer_pb2.TrainerPhase
# The others are waits, or have limits of their own.
_WORK = (Phase.TRAINER_PHASE_TRAINING, Phase.TRAINER_PHASE_PUBLISHING, Phase.TRAINER_PHASE_CHECKPOINTING)


def phase_name(phase: int) -> str:
    """Return e.g. "waiting_for_batch"."""
    return Phase.Name(phase).removeprefix("TRAINER_PHASE_").lower()


@dataclass
class Status:
    """Written by the loop; read by servicer, heartbeat and reports."""

    run_id: str
    step: int = 0
    checkpoint_step: int = 0
    published_version: int = -1
    group_epoch: int = -1
    session_epoch: int = -1
    made_by: str = ""
    """Name of the client certificate that created the run; "" until the run is known, and without certificates."""
    warning: str = ""
    """What keeps the training from learning anything; "" for nothing."""
    batches: int = 0
    """Batches trained by this process."""
    on_waiting: Callable[[str, str], None] | None = None
    """Called when what is waited for changes, with the description that is gone and the new one; each may be empty."""
    allowed: float = 0.0
    """Seconds that the current phase may take beside `trainer.stall_seconds` without a part of its work done."""
    _waits: dict[int, str] = field(default_factory=dict)
    _thread: int = 0
    """The one that entered the phase."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _phase: int = Phase.TRAINER_PHASE_STARTING
    since: float = field(default_factory=time.perf_counter)
    """When the phase was entered, by time.perf_counter."""
    _seconds: dict[str, float] = field(default_factory=dict)
    _history: deque[trainer_pb2.WatchMetricsResponse] = field(default_factory=lambda: deque(maxlen=METRICS_KEPT))
    _watchers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=set)
    _closed: bool = False

    def __post_init__(self) -> None:
        """Export what changes with the state."""
        _STEP.labels(self.run_id).set_function(lambda: self.step)
        _PHASE.labels(self.run_id, phase_name(self._phase)).set(1)
        _CHECKPOINT_TIME.labels(self.run_id).set_to_current_time()

    def checkpointed(self, checkpoint: trainer_pb2.Checkpoint) -> None:
        """Record the newest checkpoint, which is durable."""
        self.checkpoint_step = checkpoint.step
        _CHECKPOINT_TIME.labels(self.run_id).set(checkpoint.saved_at.ToNanoseconds() / 1e9)

    @property
    def phase(self) -> int:
        """The current TrainerPhase."""
        return self._phase

    @property
    def works(self) -> bool:
        """Whether the training computes, reads or writes now; false while it waits for others."""
        return self._phase in _WORK and self._thread not in self._waits

    def enter(self, phase: int, allowed: float = 0.0) -> int:
        """Enter a phase and return the previous one."""
        with self._lock:
            self._thread, self.allowed = threading.get_ident(), allowed
            before, now = self._phase, time.perf_counter()
            name = phase_name(before)
            seconds = now - self.since
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            _PHASE_SECONDS.labels(self.run_id, name).inc(seconds)
            self._phase, self.since = phase, now
            _PHASE.labels(self.run_id, name).set(0)
            _PHASE.labels(self.run_id, phase_name(phase)).set(1)
        tracing.record(name.replace("_", " "), "", time.time() - seconds, root=True)
        return before

    @contextmanager
    def during(self, phase: int, allowed: float = 0.0) -> Iterator[None]:
        """Be in a phase inside the block; afterwards enter the previous one again."""
        before_allowed, before = self.allowed, self.enter(phase, allowed)
        try:
            yield
        finally:
            self.enter(before, before_allowed)

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase so far, including the current one."""
        with self._lock:
            seconds = dict(self._seconds)
            name = phase_name(self._phase)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - self.since
        return seconds

    @property
    def waits(self) -> list[str]:
        """Descriptions of what the threads wait for: loop, batch fetching and weight updates can wait separately."""
        return list(dict.fromkeys(self._waits.values()))

    @property
    def waiting_for(self) -> str:
        """What the threads wait for, in one line; empty: nothing."""
        return ", ".join(self.waits)

    def wait_for(self, what: str) -> None:
        """Describe what the calling thread waits for; empty: nothing."""
        with self._lock:
            before, thread = set(self._waits.values()), threading.get_ident()
            if what:
                self._waits[thread] = what
            else:
                self._waits.pop(thread, None)
            now = set(self._waits.values())
        if before != now and self.on_waiting:
            self.on_waiting(next(iter(before - now), ""), next(iter(now - before), ""))

    def record(self, report: trainer_pb2.WatchMetricsResponse) -> None:
        """Store a step's metrics and wake the watchers."""
        for name, value in report.metrics.items():
            _METRIC.labels(self.run_id, name).set(value)
        with self._lock:
            self._history.append(report)
        self._wake()

    def close(self) -> None:
        """End all `watch` streams: there will be no more metrics."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            watchers = tuple(self._watchers)
        for loop, event in watchers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def watch(self, after_step: int):
        """Yield the metrics of each step after `after_step`, first those in memory, then new ones until `close`."""
        watcher = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._watchers.add(watcher)
        try:
            while True:
                watcher[1].clear()
                closed = self._closed
                with self._lock:
                    new = [report for report in self._history if report.step > after_step]
                for report in new:
                    yield report
                    after_step = max(after_step, report.step)
                if closed:
                    return
                await watcher[1].wait()
        finally:
            with self._lock:
                self._watchers.discard(watcher)
