"""The handshake: two releases that cannot work together say so at once, in words; and how idle a service is."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from quartet.v1 import common_pb2, common_pb2_grpc

from quartet_common import CONTRACT_MAJOR, CONTRACT_MINOR, __version__
from quartet_common.durations import now_timestamp
from quartet_common.errors import failed_precondition
from quartet_common.log import get_logger

WINDOW_SECONDS = 60.0


class Idleness:
    """How idle the service was in the last minute, or since it was asked last if that is longer ago."""

    def __init__(self, busy_seconds: Callable[[], float] = lambda: 0.0):
        """Begin to measure.

        Args:
            busy_seconds: of all time, how long it had work under way outside of its process (workers, a sandbox). The
                processor time of its own process is known; the two may overlap, so the larger counts.
        """
        self._busy_seconds = busy_seconds
        self._looks = deque([self._look()])  # oldest first

    def fraction(self) -> float | None:
        """Share of the time without work, 0 to 1; None before a second is over."""
        now = self._look()
        while len(self._looks) > 1 and now[0] - self._looks[1][0] >= WINDOW_SECONDS:
            self._looks.popleft()
        seconds, *work = (end - begin for begin, end in zip(self._looks[0], now, strict=True))
        if now[0] - self._looks[-1][0] >= 1:
            self._looks.append(now)
        return max(0.0, 1 - max(work) / seconds) if seconds >= 1 else None

    def _look(self) -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), self._busy_seconds()


log = get_logger(__name__)

CONTRACT = common_pb2.ContractVersion(major=CONTRACT_MAJOR, minor=CONTRACT_MINOR)

# Peers with other builds of these cannot share a process group.
_MUST_MATCH = ("nccl",)


class WaitingFor:
    """What a service waits for before it can work, in words. Each thing is logged once when it begins and ends."""

    def __init__(self) -> None:
        self._things: dict[str, None] = {}

    def add(self, thing: str) -> None:
        """Say that the service waits for `thing`."""
        if thing not in self._things:
            self._things[thing] = None
            log.info("waiting for %s", thing)

    def discard(self, thing: str) -> None:
        """Say that it waits no longer."""
        if thing in self._things:
            del self._things[thing]
            log.info("no longer waiting for %s", thing)

    def __iter__(self):
        return iter(tuple(self._things))

    def __bool__(self) -> bool:
        return bool(self._things)


@dataclass
class Identity:
    """Who a service says it is."""

    kind: int
    instance_id: str
    capabilities: list[str] = field(default_factory=list)
    libraries: dict[str, str] = field(default_factory=dict)
    waiting: WaitingFor = field(default_factory=WaitingFor)
    idleness: Idleness | None = None
    started_at: Timestamp = field(default_factory=now_timestamp)


class HandshakeServicer(common_pb2_grpc.HandshakeServiceServicer):
    """Answers for a service."""

    def __init__(self, identity: Identity):
        self._identity = identity

    async def Handshake(self, request, context):  # noqa: N802 (the contract's name)
        me = self._identity
        if request.HasField("contract") and request.contract.major != CONTRACT_MAJOR:
            older = "caller" if request.contract.major < CONTRACT_MAJOR else "service"
            raise failed_precondition(
                "contract",
                f"the caller speaks major version {request.contract.major}, this service {CONTRACT_MAJOR}: "
                f"upgrade the {older}",
            )
        lacking = sorted(set(request.required_capabilities) - set(me.capabilities))
        if lacking:
            raise failed_precondition(
                "capabilities",
                f"the caller needs {', '.join(lacking)}, which this service lacks; it has "
                f"{', '.join(sorted(me.capabilities)) or 'none'}",
            )
        for library in _MUST_MATCH:
            theirs, ours = request.libraries.get(library), me.libraries.get(library)
            if theirs and ours and theirs != ours:
                raise failed_precondition(
                    f"libraries.{library}",
                    f"the caller has {theirs}, this service {ours}: install the same {library} on both sides",
                )
        return common_pb2.HandshakeResponse(
            service=me.kind,
            instance_id=me.instance_id,
            build=__version__,
            contract=CONTRACT,
            capabilities=sorted(me.capabilities),
            libraries=me.libraries,
            started_at=me.started_at,
            waiting_for=list(me.waiting),
            idle_fraction=me.idleness.fraction() if me.idleness else None,
        )


def handshake(
    channel: grpc.Channel | grpc.aio.Channel,
    caller: int,
    required: Sequence[str] = (),
    timeout: float = 10.0,
) -> Any:
    """Shake hands over a channel; return the HandshakeResponse, of an asyncio channel to be awaited.

    Raises grpc.RpcError; FAILED_PRECONDITION says what to upgrade.
    """
    request = common_pb2.HandshakeRequest(
        caller=caller,
        build=__version__,
        contract=CONTRACT,
        required_capabilities=required,
    )
    return common_pb2_grpc.HandshakeServiceStub(channel).Handshake(request, timeout=timeout)
