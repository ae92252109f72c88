"""The handshake, which detects incompatible releases and reports what a service waits for and how idle it is."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from quartet.v1 import common_pb2, common_pb2_grpc

from quartet_common import CONTRACT_MAJOR, CONTRACT_MINOR
from quartet_common.build import read_build
from quartet_common.durations import now_timestamp
from quartet_common.errors import failed_precondition
from quartet_common.log import get_logger

WINDOW_SECONDS = 60.0


class Idleness:
    """How idle the service was in the last minute, or since the last query if that is longer ago."""

    def __init__(self, busy_seconds: Callable[[], float] = lambda: 0.0):
        """Begin to measure.

        Args:
            busy_seconds: total time in which work ran outside of this process (workers, a sandbox). It may overlap with
                this process's own CPU time, so the larger of the two counts.
        """
        self._busy_seconds = busy_seconds
        self._samples = deque([self._sample()])  # oldest first

    def fraction(self) -> float | None:
        """Return the share of the time without work, 0 to 1; None during the first second."""
        now = self._sample()
        while len(self._samples) > 1 and now[0] - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()
        seconds, *work = (end - begin for begin, end in zip(self._samples[0], now, strict=True))
        if now[0] - self._samples[-1][0] >= 1:
            self._samples.append(now)
        return max(0.0, 1 - max(work) / seconds) if seconds >= 1 else None

    def _sample(self) -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), self._busy_seconds()


log = get_logger(__name__)

CONTRACT = common_pb2.ContractVersion(major=CONTRACT_MAJOR, minor=CONTRACT_MINOR)

# Libraries whose versions must be equal at both peers, which otherwise cannot share a process group.
_MUST_MATCH = ("nccl",)


class WaitingFor:
    """Descriptions of what a service waits for before it can work. Each is logged when the wait begins and ends."""

    def __init__(self) -> None:
        self._awaited: dict[str, None] = {}

    def add(self, description: str) -> None:
        """Record that the service waits for something."""
        if description not in self._awaited:
            self._awaited[description] = None
            log.info("waiting for %s", description)

    def discard(self, description: str) -> None:
        """Record that the service no longer waits for something."""
        if description in self._awaited:
            del self._awaited[description]
            log.info("no longer waiting for %s", description)

    def __iter__(self):
        return iter(tuple(self._awaited))

    def __bool__(self) -> bool:
        return bool(self._awaited)


@dataclass
class Identity:
    """What a service reports about itself."""

    kind: int
    instance_id: str
    capabilities: list[str] = field(default_factory=list)
    libraries: dict[str, str] = field(default_factory=dict)
    waiting: WaitingFor = field(default_factory=WaitingFor)
    idleness: Idleness | None = None
    started_at: Timestamp = field(default_factory=now_timestamp)


class HandshakeServicer(common_pb2_grpc.HandshakeServiceServicer):
    """Answers handshakes for a service."""

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
            build=read_build(),
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
    """Call Handshake and return the response; over an asyncio channel, an awaitable of it.

    Raises grpc.RpcError; FAILED_PRECONDITION says what to upgrade.
    """
    request = common_pb2.HandshakeRequest(
        caller=caller,
        build=read_build(),
        contract=CONTRACT,
        required_capabilities=required,
    )
    return common_pb2_grpc.HandshakeServiceStub(channel).Handshake(request, timeout=timeout)
