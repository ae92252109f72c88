"""What the rollouts spend their time on, as seen from the trainer: sampled from their status, by a thread of its own.

So their idle fraction, and their rows of the trace, are on the trainer's clock and need nothing of the rollouts that
every rollout has not.
"""

import threading
import time
from collections.abc import Callable, Mapping

import grpc
from quartet.v1 import broker_pb2, rollout_pb2, rollout_pb2_grpc

from quartet_common.channel import connect_sync
from quartet_common.config import SecuritySection
from quartet_trainer.records.traces import Trace

CALL_SECONDS = 2.0
JOIN_SECONDS = 5.0

BUSY, IDLE, UPDATING = "generating", "idle", "updating weights"


def doing(status: rollout_pb2.RolloutServiceGetStatusResponse) -> str:
    """What a rollout does, by its status: `updating weights`, `generating`, or `idle`."""
    if status.paused:
        return UPDATING
    return BUSY if status.running or status.waiting else IDLE


class RolloutObserver:
    """Asks every live rollout every `interval` seconds, with 0 never. One that does not answer is not counted."""

    def __init__(
        self,
        rollouts: Callable[[], Mapping[str, broker_pb2.Member]],
        security: SecuritySection,
        interval: float,
        trace: Trace | None = None,
    ):
        """`rollouts`: the live ones, by instance id."""
        self._rollouts = rollouts
        self._security = security
        self._interval = interval
        self._trace = trace
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._since: dict[str, tuple[str, float]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observe-rollouts", daemon=True)
        if interval:
            self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Return shares of the rollouts' time since the last call; nothing if no rollout was seen."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        total = sum(seconds.values())
        if not total:
            return {}
        return {
            "rollouts/idle_fraction": seconds.get(IDLE, 0.0) / total,
            "rollouts/updating_fraction": seconds.get(UPDATING, 0.0) / total,
        }

    def close(self) -> None:
        """End the thread and the channels."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
        for channel in self._channels.values():
            channel.close()

    def _watch(self) -> None:
        while not self._closing.wait(self._interval):
            live = dict(self._rollouts())
            for name in self._channels.keys() - live.keys():
                self._channels.pop(name).close()
                self._end(name)
            calls = {}
            for name, member in live.items():
                if name not in self._channels:
                    self._channels[name] = connect_sync(member.address, self._security, service="rollout")
                stub = rollout_pb2_grpc.RolloutServiceStub(self._channels[name])
                calls[name] = stub.GetStatus.future(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=CALL_SECONDS)
            for name, call in calls.items():
                try:
                    self._take(name, doing(call.result()))
                except grpc.RpcError:
                    self._end(name)  # whether it lives is for the broker to say
        for name in list(self._since):
            self._end(name)

    def _take(self, name: str, now_doing: str) -> None:
        """What is seen now has been so since the last look."""
        now = time.perf_counter()
        before = self._since.get(name)
        self._since[name] = (now_doing, now)
        if before is None:
            return
        _, since = before
        with self._lock:
            self._seconds[now_doing] = self._seconds.get(now_doing, 0.0) + now - since
        if self._trace is not None:
            self._trace.span(f"rollout {name}", now_doing, since, now - since)

    def _end(self, name: str) -> None:
        self._since.pop(name, None)
