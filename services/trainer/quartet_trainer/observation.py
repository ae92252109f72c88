"""What the rollouts spend their time on, as seen from the trainer: sampled from their status, by a thread of its own.

So their idle fraction needs nothing of the rollouts that every rollout has not.
"""

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
    """What a rollout does, by its status: `updating weights`, `generating`, or `idle`."""
    if status.paused:
        return UPDATING
    return BUSY if status.running or status.waiting else IDLE


class RolloutObserver:
    """Asks every live rollout every `LOOK_SECONDS`. One that does not answer is not counted."""

    def __init__(self, rollouts: Callable[[], Mapping[str, broker_pb2.Member]], security: SecuritySection):
        """`rollouts`: the live ones, by instance id."""
        self._rollouts = rollouts
        self._security = security
        self._looks: Counter[str] = Counter()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observe-rollouts", daemon=True)
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Return shares of the rollouts' time since the last call; nothing if no rollout was seen."""
        looks, self._looks = self._looks, Counter()
        total = looks.total()
        if not total:
            return {}
        return {
            "rollouts/idle_fraction": looks[IDLE] / total,
            "rollouts/updating_fraction": looks[UPDATING] / total,
        }

    def close(self) -> None:
        """End the thread and its channels."""
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
                with contextlib.suppress(grpc.RpcError):  # whether it lives is for the broker to say
                    self._looks[doing(call.result())] += 1
        for channel in channels.values():
            channel.close()
