"""Samples the rollouts' GetStatus to measure which share of their time they are idle or updating weights."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping

import grpc
from quartet.v1 import broker_pb2, rollout_pb2, rollout_pb2_grpc

from quartet_common.channel import connect_sync
from quartet_common.config import SecuritySection

LOOK_SECONDS = 1.0
CALL_SECONDS = 2.0
JOIN_SECONDS = 5.0

BUSY, IDLE, UPDATING = "generating", "idle", "updating weights"


def doing(status: rollout_pb2.RolloutServiceGetStatusResponse) -> str:
    """Return what a rollout is doing: `updating weights`, `generating`, or `idle`."""
    if status.paused:
        return UPDATING
    return BUSY if status.running or status.waiting else IDLE


class RolloutObserver:
    """Calls GetStatus at every live rollout, every `LOOK_SECONDS`, on a thread. Failed calls are not counted."""

    def __init__(self, rollouts: Callable[[], Mapping[str, broker_pb2.Member]], security: SecuritySection):
        """`rollouts`: returns the live rollouts, by instance id."""
        self._rollouts = rollouts
        self._security = security
        self._samples: Counter[str] = Counter()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observe-rollouts", daemon=True)
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Return shares of the rollouts' time since the last call; empty if no rollout answered."""
        samples, self._samples = self._samples, Counter()
        total = samples.total()
        if not total:
            return {}
        return {
            "rollouts/idle_fraction": samples[IDLE] / total,
            "rollouts/updating_fraction": samples[UPDATING] / total,
        }

    def close(self) -> None:
        """End the thread and close its channels."""
        self._closing.set()
        self._thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        channels: dict[str, grpc.Channel] = {}
        while not self._closing.wait(LOOK_SECONDS):
            live = self._rollouts()
            for name in channels.keys() - live.keys():
                channels.pop(name).close()
            calls = []
            for name, member in live.items():
                if name not in channels:
                    channels[name] = connect_sync(member.address, self._security, service="rollout")
                stub = rollout_pb2_grpc.RolloutServiceStub(channels[name])
                calls.append(stub.GetStatus.future(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=CALL_SECONDS))
            for call in calls:
                with contextlib.suppress(grpc.RpcError):  # the membership at the broker decides who is alive
                    self._samples[doing(call.result())] += 1
        for channel in channels.values():
            channel.close()
