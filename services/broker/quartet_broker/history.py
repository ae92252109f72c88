"""The history of a group, as `lua/lib/moments.lua` records it: GetGroup."""

from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys, validation
from quartet_broker.errors import run_not_found
from quartet_broker.events import timestamp
from quartet_broker.store import Store
from quartet_common.errors import not_found

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

# Fields of an instance: its state, and its history.
_FIELDS = ("state", "attempt", "holder", "step", "life", "taken", "prompt")


class History:
    """Single groups: their state, and what happened to them."""

    def __init__(self, store: Store):
        self._store = store

    async def get(self, request: broker_pb2.GetGroupRequest) -> broker_pb2.GetGroupResponse:
        """Return the state of one prompt instance, and its history."""
        run_id = validation.name("run_id", request.run_id)
        prefix = keys.prefix(request.run_id)
        (run_state, trainer), fields, settled, past = await self._store.read(
            [
                ("HMGET", keys.run(run_id), "state", "trainer"),
                ("HMGET", f"{prefix}i:{request.instance_id}", *_FIELDS),
                ("HGET", prefix + "settled", request.instance_id),
                ("HGET", prefix + "lives", request.instance_id),
            ]
        )
        if run_state is None or run_state == b"DELETING":
            raise run_not_found(run_id)
        state, attempt, holder, step, record, taken, prompt = fields
        if state not in (b"LEASED", b"LEASED_TO_TRAINER"):
            holder = None  # the last one's name may stand there still
        if state is None:
            if settled is None:
                raise not_found("prompt instance", request.instance_id, "the run never saw it, or forgot it")
            state, _, attempt, step, _ = settled.split(b"|")
            record = past
        if taken:
            record = (record or b"") + b"\nB %s %s" % (taken, step)
        if state == b"STORED":
            state = b"QUEUED"  # of an evaluation set: it waits for StartEvaluation
        if state == b"LEASED_TO_TRAINER":
            holder = trainer
            (batch,) = await self._store.read([("HGET", prefix + "batches", step)])
            if batch == b"TRAINED":  # stands once, with the batch
                state, holder = batch, None
        return broker_pb2.GetGroupResponse(
            state=broker_pb2.GroupState.Value(f"GROUP_STATE_{state.decode()}"),
            attempt=int(attempt),
            holder=(holder or b"").decode(),
            step=int(step) if step is not None else -1,
            moments=read_history(record),
            traceparent=experience_pb2.PromptInstance.FromString(prompt).traceparent if prompt else "",
            answered_at=timestamp(await self._store.time(run_id)),
        )


def read_history(record: bytes | None) -> list[broker_pb2.GroupMoment]:
    """Return the moments of a record, oldest first; none of None."""
    moments: list[broker_pb2.GroupMoment] = []
    holder = ""
    for line in (record or b"").decode(errors="replace").splitlines():
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
