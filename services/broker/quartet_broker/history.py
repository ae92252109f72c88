"""A group's life as `lua/lib/moments.lua` writes it, as the contract's messages."""

from quartet.v1 import broker_pb2

from quartet_broker.events import timestamp

_KINDS = {
    "S": broker_pb2.GROUP_MOMENT_KIND_SUBMITTED,
    "L": broker_pb2.GROUP_MOMENT_KIND_LEASED,
    "R": broker_pb2.GROUP_MOMENT_KIND_RETURNED,
    "P": broker_pb2.GROUP_MOMENT_KIND_PUT,
    "B": broker_pb2.GROUP_MOMENT_KIND_IN_BATCH,
    "C": broker_pb2.GROUP_MOMENT_KIND_COMMITTED,
    "D": broker_pb2.GROUP_MOMENT_KIND_DROPPED,
    "E": broker_pb2.GROUP_MOMENT_KIND_DELIVERED,
    "X": broker_pb2.GROUP_MOMENT_KIND_DEAD,
    "Q": broker_pb2.GROUP_MOMENT_KIND_REQUEUED,
}


def read_history(life: bytes | None) -> list[broker_pb2.GroupMoment]:
    """Return the moments of a life, oldest first; none of None."""
    moments: list[broker_pb2.GroupMoment] = []
    holder = ""
    for line in (life or b"").decode(errors="replace").splitlines():
        letter, at, detail = (*line.split(" ", 2), "")[:3]
        moment = broker_pb2.GroupMoment(
            kind=_KINDS.get(letter, broker_pb2.GROUP_MOMENT_KIND_UNSPECIFIED),
            at=timestamp(float(at)),
            step=-1,
            policy_version=-1,
        )
        match letter:
            case "L":
                moment.who = holder = detail
            case "P":
                moment.who, moment.policy_version = holder, int(detail)
            case "B" | "C":
                moment.step = int(detail or -1)
            case "R" | "X" | "D":
                moment.reason = detail
        moments.append(moment)
    return moments
