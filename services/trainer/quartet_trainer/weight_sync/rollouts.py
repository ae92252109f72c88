"""The live rollouts, calls to several of them, and the weight group of an epoch."""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from quartet.v1 import broker_pb2, common_pb2, rollout_pb2, rollout_pb2_grpc

from quartet_common.channel import connect_sync
from quartet_common.config import SecuritySection
from quartet_common.errors import describe
from quartet_common.handshake import handshake
from quartet_server.transports import how_to_install
from quartet_trainer.members import Members
from quartet_weights.process_group import ProcessGroup

# How often liveness and the deadline are checked while waiting.
POLL_SECONDS = 0.2
STATUS_SECONDS = 5.0
CLOSE_SECONDS = 2.0
FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 30.0

Method = Callable[[rollout_pb2_grpc.RolloutServiceStub], Any]
"""Returns one of a stub's methods."""


class TransferFailed(Exception):
    """An update, or the forming of a group, failed.

    Attributes:
        blame: the error of each rollout that is known to have failed, by instance id; may be empty.
    """

    def __init__(self, what: str, blame: Mapping[str, str] | None = None):
        self.blame = dict(blame or {})
        super().__init__(what + "".join(f"; {name}: {why}" for name, why in self.blame.items()))


@dataclass(eq=False)
class Rollout:
    """A live rollout, as the publisher knows it."""

    channel: grpc.Channel
    member: broker_pb2.Member
    """As the broker last told of it."""
    version: int | None = None
    """Version this trainer installed; None: none, or unknown."""
    ranks: int = 1
    """Its tensor-parallel size; corrected by its answer to JoinWeightGroup."""
    failures: int = 0
    retry_at: float = 0.0

    def __post_init__(self) -> None:
        self.stub = rollout_pb2_grpc.RolloutServiceStub(self.channel)

    def status(self) -> rollout_pb2.RolloutServiceGetStatusResponse:
        """Raises grpc.RpcError."""
        return self.stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=STATUS_SECONDS)

    def has_lost_weights(self) -> bool:
        """Ask it, because its last heartbeat may be older than its weights."""
        try:
            status = self.status()
        except grpc.RpcError:
            return False  # its membership at the broker decides whether it is alive
        return status.policy_version < 0 and not status.paused

    def back_off(self) -> float:
        """Skip it for a while, twice as long after each failure; return the seconds."""
        seconds = min(FIRST_BACKOFF_SECONDS * 2**self.failures, LONGEST_BACKOFF_SECONDS)
        self.version, self.failures, self.retry_at = None, self.failures + 1, time.monotonic() + seconds
        return seconds


class Rollouts:
    """The live rollouts, with a channel to each. Use it from one thread at a time."""

    def __init__(self, members: Members, security: SecuritySection, stopping: Callable[[], bool] = lambda: False):
        """`stopping`: whether this trainer was asked to stop."""
        self.members, self.stopping = members, stopping
        self._security = security
        self._known: dict[str, Rollout] = {}
        self._stop_seen: float | None = None

    def live(self) -> dict[str, Rollout]:
        """Return the live rollouts by instance id; connect with the new ones, and close the channels to the others."""
        live = self.members.rollouts()
        for name in self._known.keys() - live.keys():
            self._known.pop(name).channel.close()
        for name, member in live.items():
            if name not in self._known:
                channel = connect_sync(member.address, self._security, service="rollout")
                self._known[name] = Rollout(channel, member)
            self._known[name].member = member
        return {name: self._known[name] for name in live}

    def alive(self, name: str) -> bool:
        """Whether a call is to wait for the rollout: it is alive. False for all, `CLOSE_SECONDS` after this trainer was
        asked to stop."""
        if self.stopping() and self._stop_seen is None:
            self._stop_seen = time.monotonic()
        in_time = self._stop_seen is None or time.monotonic() < self._stop_seen + CLOSE_SECONDS
        return in_time and self.members.alive(name)

    def call(self, rollouts: Mapping[str, Rollout], method: Method, request: Any, deadline: float) -> dict[str, str]:
        """Call a method at all `rollouts` until `deadline` (time.monotonic); return the errors by instance id."""
        seconds = max(0.1, deadline - time.monotonic())
        calls = {name: method(one.stub).future(request, timeout=seconds) for name, one in rollouts.items()}
        return gather(calls, deadline, self.alive)

    def close(self) -> None:
        """Close the channels."""
        for rollout in self._known.values():
            rollout.channel.close()
        self._known.clear()


@dataclass
class WeightGroup:
    """One epoch's group."""

    run_id: str
    epoch: int
    world_size: int
    """Ranks, the trainer included."""
    seconds: float
    """Deadline of each operation, i.e. of one bucket."""
    rollouts: dict[str, Rollout]
    """By instance id."""
    alive: Callable[[str], bool]
    process_group: ProcessGroup | None = None
    """With the transports gloo and nccl."""
    deadline: float = 0.0
    """Of the update under way, by time.monotonic."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)
    """Which only the members have."""

    def check(self) -> None:
        """Raise TransferFailed if the update's deadline has passed or a member is gone. Cheap: call it while
        waiting."""
        if time.monotonic() > self.deadline:
            raise TransferFailed("the tensors did not go through in time")
        if gone := next((name for name in self.rollouts if not self.alive(name)), ""):
            raise TransferFailed("the update was given up", {gone: "is gone"})


def gather(calls: Mapping[str, grpc.Future], deadline: float, alive: Callable[[str], bool]) -> dict[str, str]:
    """Wait for all calls until `deadline` (time.monotonic); cancel one whose rollout is not `alive`. Return the errors
    of those that failed."""
    errors: dict[str, str] = {}
    for name, call in calls.items():
        while not call.done():
            try:
                call.exception(POLL_SECONDS)
            except grpc.FutureTimeoutError:
                late = time.monotonic() > deadline
                if late or not alive(name):
                    errors[name] = "did not answer in time" if late else "is gone"
                    call.cancel()
        if name not in errors and (error := call.exception()) is not None:
            errors[name] = describe(error)
    return errors


def greet(rollouts: Mapping[str, Rollout], transport: str, kind: str) -> int:
    """Handshake with rollouts, and return the newest group epoch that they know: before a restart, this trainer may
    have used epochs unknown to the broker.

    Raises:
        TransferFailed: some cannot receive weights of this kind, "full" or "lora", by the transport, or do not answer;
            or another instance answers at an address: its rollout was killed and started again, and the membership of
            the killed one has not expired yet.
    """
    newest, needed = 0, [f"weights.{transport}", f"weights.{kind}"]
    errors: dict[str, str] = {}
    for name, rollout in rollouts.items():
        try:
            handshake(rollout.channel, common_pb2.SERVICE_KIND_TRAINER, needed, timeout=STATUS_SECONDS)
            status = rollout.status()
        except grpc.RpcError as error:
            errors[name] = describe(error)
            if needed[0] in errors[name].partition("; it has ")[0]:
                errors[name] += how_to_install(transport)
            continue
        if status.instance_id not in ("", name):  # earlier releases leave it empty
            errors[name] = f"'{status.instance_id}' answers at its address"
        newest = max(newest, status.group_epoch, status.newest_group_epoch)
    if errors:
        raise TransferFailed("handshake failed", errors)
    return newest
