"""The run's members: watches the live rollouts, keeps this trainer registered, and reports its events.

Each class has daemon threads of its own.
"""

import contextlib
import queue
import threading
from collections.abc import Callable

import grpc
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2

from quartet_common.errors import describe
from quartet_common.log import get_logger
from quartet_common.outage import Outage

log = get_logger(__name__)

RETRY_SECONDS = 1.0
CALL_SECONDS = 10.0
REPORT_SECONDS = 5.0
MOST_WAITING = 1000


class Members:
    """The live rollouts, updated from WatchMembers until `close`; also this trainer's own registration.

    While the broker is unavailable, the last known membership stays valid.
    """

    def __init__(
        self,
        stub: broker_pb2_grpc.BrokerServiceStub,
        run_id: str,
        me: Callable[[], broker_pb2.Member],
        heartbeat_seconds: float,
        on_change: Callable[[], None],
    ):
        """`me`: returns this trainer's current Member. `on_change`: called when a rollout joins, leaves or lost its
        weights."""
        self._stub = stub
        self._run_id = run_id
        self._me = me
        self._heartbeat_seconds = heartbeat_seconds
        self._on_change = on_change
        self._lock = threading.Lock()
        self._rollouts: dict[str, broker_pb2.Member] = {}
        self._epoch = 0
        self._closing = threading.Event()
        self._watch_call: grpc.Call | None = None
        self._threads = [
            threading.Thread(target=self._watch, name="watch-members", daemon=True),
            threading.Thread(target=self._stay_member, name="heartbeat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Leave the run and stop watching."""
        self._closing.set()
        if self._watch_call is not None:
            self._watch_call.cancel()
        for thread in self._threads:
            thread.join(timeout=CALL_SECONDS)

    @property
    def epoch(self) -> int:
        """The broker's group epoch."""
        return self._epoch

    def rollouts(self) -> dict[str, broker_pb2.Member]:
        """Return the rollouts that are not draining, by instance id."""
        with self._lock:
            return dict(self._rollouts)

    def alive(self, instance_id: str) -> bool:
        """Whether a rollout is a member. True for all until the first membership has arrived."""
        with self._lock:
            return not self._epoch or instance_id in self._rollouts

    def _watch(self) -> None:
        outage = Outage()
        while not self._closing.is_set():
            try:
                updates = self._stub.WatchMembers(broker_pb2.WatchMembersRequest(run_id=self._run_id))
                self._watch_call = updates
                if self._closing.is_set():  # `close` may have looked for the call before it was there
                    updates.cancel()
                for update in updates:
                    outage.over()
                    self._apply(update)
            except grpc.RpcError as error:
                if not self._closing.is_set() and outage.to_be_logged():
                    log.warning("membership cannot be watched, trying again", extra={"error": describe(error)})
            self._closing.wait(outage.failed())

    def _apply(self, update: broker_pb2.WatchMembersResponse) -> None:
        rollouts = {
            member.instance_id: member
            for member in update.members
            if member.kind == common_pb2.SERVICE_KIND_ROLLOUT and member.state != broker_pb2.MEMBER_STATE_DRAINING
        }
        with self._lock:
            before, self._rollouts, self._epoch = self._rollouts, rollouts, update.group_epoch
        for instance_id in rollouts.keys() - before.keys():
            log.info("rollout joined", extra={"rollout": instance_id, "address": rollouts[instance_id].address})
        for instance_id in before.keys() - rollouts.keys():
            log.info("rollout left", extra={"rollout": instance_id})
        lost_weights = any(
            member.policy_version < 0 <= before[name].policy_version
            for name, member in rollouts.items()
            if name in before
        )
        if rollouts.keys() != before.keys() or lost_weights:
            self._on_change()

    def _stay_member(self) -> None:
        registered, outage = False, Outage()
        while True:
            try:
                if registered:
                    request = broker_pb2.HeartbeatRequest(run_id=self._run_id, member=self._me())
                    self._stub.Heartbeat(request, timeout=CALL_SECONDS)
                else:
                    request = broker_pb2.RegisterMemberRequest(run_id=self._run_id, member=self._me())
                    self._stub.RegisterMember(request, timeout=CALL_SECONDS)
                    registered = True
                outage.over()
            except grpc.RpcError as error:
                if outage.to_be_logged():
                    log.warning("heartbeat failed", extra={"error": describe(error)})
                registered = False  # the broker may have dropped this member; registering again is idempotent
            if self._closing.wait(self._heartbeat_seconds if registered else RETRY_SECONDS):
                break
        try:
            request = broker_pb2.LeaveMemberRequest(run_id=self._run_id, instance_id=self._me().instance_id)
            self._stub.LeaveMember(request, timeout=2.0)
        except grpc.RpcError as error:
            log.info("could not leave; the membership will expire", extra={"error": describe(error)})


class Reporter:
    """Sends a run's events by ReportProgress, on a thread."""

    def __init__(self, stub: broker_pb2_grpc.BrokerServiceStub, run_id: str, source: str):
        self._stub = stub
        self._run_id = run_id
        self._source = source
        self._events: queue.Queue[broker_pb2.RunEvent | None] = queue.Queue(maxsize=MOST_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="report-progress", daemon=True)
        self._thread.start()

    def report(self, **event) -> None:
        """Queue an event, e.g. `report(step=StepFinished(...))`. It is dropped if the queue is full."""
        try:
            self._events.put_nowait(broker_pb2.RunEvent(**event))
        except queue.Full:
            log.warning("progress event dropped: too many are waiting to be sent")

    def notice(self, level: str, text: str) -> None:
        """Queue a message for people: "info", "warning" or "error"."""
        self.report(notice=broker_pb2.Notice(level=level, text=text, source=self._source))

    def close(self, seconds: float = REPORT_SECONDS) -> None:
        """Send the queued events, for at most `seconds`, and end the thread."""
        with contextlib.suppress(queue.Full):
            self._events.put(None, timeout=seconds)
        self._thread.join(timeout=seconds)

    def _send_all(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                request = broker_pb2.ReportProgressRequest(run_id=self._run_id, event=event)
                self._stub.ReportProgress(request, timeout=REPORT_SECONDS)
            except grpc.RpcError as error:
                log.warning("progress event lost", extra={"error": describe(error)})
