"""HandshakeService: the same cases on each of the four servers."""

import grpc
from quartet.v1 import common_pb2 as pb

from quartet_contract.cases import Bad, Case, Good

STATE = grpc.StatusCode.FAILED_PRECONDITION
GREETING = pb.HandshakeRequest(
    caller=pb.SERVICE_KIND_CLIENT, build="another make", contract=pb.ContractVersion(major=1, minor=99)
)
_TOO_NEW = pb.HandshakeRequest(contract=pb.ContractVersion(major=99))
_WANTS_MORE = pb.HandshakeRequest(
    contract=pb.ContractVersion(major=1), required_capabilities=["teleport.of.tensors", "time.travel"]
)


CHANGING = ("waiting_for", "idle_fraction")


def _introduces_itself(w, answer):
    assert answer.contract.major == 1
    assert answer.service in (1, 2, 3, 4, 6) and answer.instance_id and answer.build
    assert answer.started_at.seconds > 0
    assert len(set(answer.capabilities)) == len(answer.capabilities) > 0


CASES: dict[str, list[Case]] = {
    "HandshakeService.Handshake": [
        Good("a newer minor version is welcome", lambda w: GREETING, _introduces_itself, volatile=CHANGING),
        Good("from a client of another make", lambda w: pb.HandshakeRequest(), _introduces_itself, volatile=CHANGING),
        Bad("another major version", lambda w: _TOO_NEW, STATE, "upgrade"),
        Bad("a capability it lacks", lambda w: _WANTS_MORE, STATE, "teleport.of.tensors"),
    ]
}
