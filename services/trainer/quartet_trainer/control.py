"""Requests from the service and other threads to the training loop. Thread-safe."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import grpc
from quartet.v1 import trainer_pb2


class Stopped(Exception):
    """The loop was asked to stop while it waited."""


class WakeEvent:
    """An event that also cancels the RPC that its owner is blocked in."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.RpcContext | None = None

    def set(self) -> None:
        """Wake the owner."""
        with self._lock:
            self._event.set()
            call = self._call
        if call is not None:
            call.cancel()

    def clear(self) -> None:
        """Reset it. The owner must look for work after this, not before."""
        self._event.clear()

    def wait(self, seconds: float) -> bool:
        """Block until it is set; False if it was not within `seconds`."""
        return self._event.wait(seconds)

    @contextmanager
    def may_cancel(self, call: grpc.RpcContext) -> Iterator[None]:
        """Within the block, `set` cancels `call`, an RPC in progress."""
        with self._lock:
            self._call = call
            pending = self._event.is_set()
        if pending:
            call.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._call = None


class Control:
    """Requests to stop, to pause between steps, and to save a checkpoint."""

    def __init__(self) -> None:
        self.wake = WakeEvent()
        self.stopping = threading.Event()
        self.leave: Callable[[], None] = lambda: None
        """Leaves the run, on any thread: for a loop that has hung."""
        self._paused_until = -math.inf  # by time.monotonic
        self._steps = 0  # optimizer steps begun, those before a restart included
        self._lock = threading.Lock()
        self._checkpoints: list[Future[trainer_pb2.Checkpoint]] = []

    def stop(self) -> None:
        """Ask the loop to end after the current step."""
        self.stopping.set()
        self.wake.set()

    @property
    def paused(self) -> bool:
        """True while no step begins."""
        return self.pause_left > 0

    @property
    def pause_left(self) -> float:
        """Seconds until the pause expires; 0: not paused."""
        return max(0.0, self._paused_until - time.monotonic())

    def begin_step(self, step: int) -> bool:
        """Begin `step` unless the loop is paused. Return whether it has begun."""
        with self._lock:
            if self.paused:
                return False
            self._steps = step + 1
            return True

    def pause(self, seconds: float = math.inf) -> int:
        """Ask the loop to begin no further step until `resume`, for at most `seconds`.

        Return the number of optimizer steps once the current step is done; 0 if this process has begun none.
        """
        with self._lock:
            self._paused_until = max(self._paused_until, time.monotonic() + seconds)
            steps = self._steps
        self.wake.set()
        return steps

    def resume(self) -> None:
        """Let the loop go on."""
        self._paused_until = -math.inf
        self.wake.set()

    def wait(self, seconds: float) -> None:
        """Wait in a retry. Raises Stopped as soon as the loop is asked to stop."""
        if self.stopping.wait(seconds):
            raise Stopped

    def request_checkpoint(self) -> "Future[trainer_pb2.Checkpoint]":
        """Ask for a checkpoint after the current step."""
        future: Future[trainer_pb2.Checkpoint] = Future()
        with self._lock:
            self._checkpoints.append(future)
        self.wake.set()
        return future

    @property
    def checkpoint_requested(self) -> bool:
        """Whether a request for a checkpoint is waiting."""
        return bool(self._checkpoints)

    def take_checkpoint_requests(self) -> "list[Future[trainer_pb2.Checkpoint]]":
        """Return the waiting requests; the caller must answer each. Those cancelled by their callers are dropped."""
        with self._lock:
            requests, self._checkpoints = self._checkpoints, []
        return [request for request in requests if request.set_running_or_notify_cancel()]

    def close(self) -> None:
        """Fail the waiting requests: the loop has ended."""
        for future in self.take_checkpoint_requests():
            future.set_exception(Stopped("the training has ended"))
