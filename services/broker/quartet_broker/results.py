"""What became of groups: CollectResults (transcripts), GetGroup (a history), ListDead and RequeueDead (set aside)."""

from collections.abc import AsyncGenerator
from functools import partial

from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys, scripts, validation
from quartet_broker.errors import run_not_found
from quartet_broker.events import timestamp
from quartet_broker.notifier import Notifier
from quartet_broker.store import Store
from quartet_broker.streams import fill_page, read_page_token
from quartet_common.errors import failed_precondition, not_found, unavailable

# Redis serves nobody else while a script runs: one call requeues at most this many.
_PORTION = 1000
_REASONS = 20  # REASONS_KEPT of life.lua
_LISTED_AT_ONCE = 8  # prompts may be large


class DeadLetters:
    """The dead letters of a run."""

    def __init__(self, store: Store, answer_bytes: int):
        self._store = store
        self._answer_bytes = answer_bytes

    async def load(self, run_id: str, instance_ids: list[str]) -> list[broker_pb2.DeadPrompt | None]:
        """Return each of the instances, None for one that is not dead."""
        prefix = keys.prefix(run_id)
        commands: list[tuple] = []
        for instance_id in instance_ids:
            commands += [("ZSCORE", prefix + "dead", instance_id), ("HGETALL", f"{prefix}i:{instance_id}")]
        replies = await self._store.read(commands)
        found: list[broker_pb2.DeadPrompt | None] = []
        for died_at, fields in zip(replies[::2], replies[1::2], strict=True):
            if died_at is None or not fields:
                found.append(None)
                continue
            reasons = int(fields.get(b"reasons", 0))
            kept = range(max(1, reasons - _REASONS + 1), reasons + 1)
            found.append(
                broker_pb2.DeadPrompt(
                    instance=experience_pb2.PromptInstance.FromString(fields[b"prompt"]),
                    attempts=int(fields[b"attempt"]),
                    reasons=[fields[b"reason:%d" % n].decode() for n in kept],
                    died_at=timestamp(float(died_at)),
                    unscored_bytes=int(fields.get(b"bytes", 0)),
                )
            )
        return found

    async def list_dead(self, request: broker_pb2.ListDeadRequest) -> broker_pb2.ListDeadResponse:
        """Return dead prompts, oldest first; if the request has instance ids, only those."""
        run_id = validation.name("run_id", request.run_id)
        limit = validation.integer("limit", request.limit, 0, 10_000) or 100
        validation.count("instance_ids", request.instance_ids, 1024, least=0)
        behind = read_page_token(request.page_token)
        least = behind[0] if behind else "-inf"
        state, total, listed = await self._store.read(
            [
                ("HGET", keys.run(run_id), "state"),
                ("ZCARD", keys.prefix(run_id) + "dead"),
                ("ZRANGEBYSCORE", keys.prefix(run_id) + "dead", least, "+inf", "WITHSCORES"),
            ]
        )
        if state is None or state == b"DELETING":
            raise run_not_found(run_id)
        entries = [(float(died_at), name.decode()) for name, died_at in listed]
        if behind:
            entries = [entry for entry in entries if entry > behind]
        if request.instance_ids:
            named = set(request.instance_ids)
            entries = [entry for entry in entries if entry[1] in named]
        dead, token = await fill_page(entries, partial(self.load, run_id), _LISTED_AT_ONCE, self._answer_bytes, limit)
        return broker_pb2.ListDeadResponse(dead=dead, total=total, next_page_token=token)

    async def requeue(self, request: broker_pb2.RequeueDeadRequest) -> broker_pb2.RequeueDeadResponse:
        """Requeue dead prompts; all of them if the request has no instance ids."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("instance_ids", request.instance_ids, validation.MOST_IDS, least=0)
        ids: list = list(request.instance_ids) or await self._ids(run_id)
        return broker_pb2.RequeueDeadResponse(requeued=await self._requeue(run_id, ids, only_unscored=False))

    async def requeue_unscored(self, run_id: str) -> int:
        """Requeue the dead prompts whose completions are kept, to have them scored; return their number."""
        ids = await self._ids(run_id)
        return await self._requeue(run_id, ids, only_unscored=True) if ids else 0

    async def _ids(self, run_id: str) -> list:
        (ids,) = await self._store.read([("ZRANGE", keys.prefix(run_id) + "dead", 0, -1)])
        return ids

    async def _requeue(self, run_id: str, ids: list, only_unscored: bool) -> int:
        requeued = 0
        for start in range(0, max(1, len(ids)), _PORTION):  # without ids too, which raises NOT_FOUND if there is no run
            portion = ids[start : start + _PORTION]
            requeued += (await self._store.run(scripts.REQUEUE_DEAD, run_id, "1" if only_unscored else "", *portion))[1]
        return requeued


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

_FIELDS = ("state", "attempt", "holder", "step", "life", "taken", "prompt")


class History:
    """State and history of single instances."""

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
            holder = None  # the field may still have the last holder
        if state is None:
            if settled is None:
                raise not_found("prompt instance", request.instance_id, "never submitted, or no longer stored")
            state, _, attempt, step, _ = settled.split(b"|")
            record = past
        if taken:
            record = (record or b"") + b"\nB %s %s" % (taken, step)
        if state == b"STORED":
            state = b"QUEUED"  # of an evaluation set: it waits for StartEvaluation
        if state == b"LEASED_TO_TRAINER":
            holder = trainer
            (batch,) = await self._store.read([("HGET", prefix + "batches", step)])
            if batch == b"TRAINED":  # recorded once for the whole batch
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
    """Parse a record into moments, oldest first. None has none."""
    moments: list[broker_pb2.GroupMoment] = []
    holder = ""
    for line in filter(None, (record or b"").decode(errors="replace").split("\n")):
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


_PAGE = 512


class Results:
    """Streams results by instance id, in order of completion, each once."""

    def __init__(self, store: Store, notifier: Notifier, dead: DeadLetters):
        self._store = store
        self._notifier = notifier
        self._dead = dead

    async def collect(
        self, request: broker_pb2.CollectResultsRequest
    ) -> AsyncGenerator[broker_pb2.CollectResultsResponse]:
        """Yield each instance's transcript or dead prompt; end after the last one."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("instance_ids", request.instance_ids, validation.MOST_IDS)
        left = set(request.instance_ids)
        query = set(left)
        waiter = self._notifier.waiter(run_id, "result")
        while True:
            waiter.clear()
            waiter.details.clear()
            waiter.missed = False
            finished = await self._is_finished(run_id)
            for instance_id, is_dead in await self._done(run_id, sorted(query)):
                response = await self._result(run_id, instance_id, is_dead)
                if response is not None:
                    yield response
                    left.discard(instance_id)
            if not left:
                return
            if finished:
                description = f"it is finished; {len(left)} of the instances will not be answered"
                raise failed_precondition(f"run '{run_id}'", description)
            if not await waiter.wait():
                raise unavailable("broker", "it is stopping; collect again what is missing")
            # The notifier names what was finished; after a broken subscription, or at the run's end, query all.
            finished = await self._is_finished(run_id)
            query = set(left) if waiter.missed or finished else left & waiter.details

    async def _is_finished(self, run_id: str) -> bool:
        (state,) = await self._store.read([("HGET", keys.run(run_id), "state")])
        return state != b"ACTIVE"

    async def _done(self, run_id: str, instance_ids: list[str]) -> list[tuple[str, bool]]:
        """Return (id, is dead) of those that are done, in order of completion. Raises NOT_FOUND for an unknown one."""
        done: list[tuple[float, str, bool]] = []
        for start in range(0, len(instance_ids), _PAGE):
            page = instance_ids[start : start + _PAGE]
            reply = await self._store.run(scripts.LIST_OUTCOMES, run_id, *page)
            for instance_id, outcome, at in zip(page, reply[1::2], reply[2::2], strict=True):
                match outcome:
                    case b"DONE" | b"DEAD":
                        done.append((float(at), instance_id, outcome == b"DEAD"))
                    case b"GONE":
                        hint = "it was let go (RunSpec.result_ttl), or its prompt was skipped (RunSpec.curriculum)"
                        raise not_found("result", instance_id, hint)
                    case b"STORED":
                        hint = "it is of an evaluation set; results have the ids '{instance_id}@{version}'"
                        raise not_found("result", instance_id, hint)
                    case b"UNKNOWN":
                        raise not_found("prompt instance", instance_id, "submit it first")
        return [(instance_id, is_dead) for _, instance_id, is_dead in sorted(done)]

    async def _result(self, run_id: str, instance_id: str, is_dead: bool) -> broker_pb2.CollectResultsResponse | None:
        if is_dead:
            (dead,) = await self._dead.load(run_id, [instance_id])
            return broker_pb2.CollectResultsResponse(instance_id=instance_id, dead=dead) if dead else None
        prefix = keys.prefix(run_id)
        stored, kept = await self._store.read(
            [("HGET", f"{prefix}i:{instance_id}", "stored"), ("GET", f"{prefix}result:{instance_id}")]
        )
        transcript = kept
        if stored is not None:  # the group is not terminal yet
            (transcript,) = await self._store.read([("GET", f"{prefix}transcript:{stored.decode()}")])
        if transcript is None:
            return None  # requeued as stale meanwhile: it will be finished again
        return broker_pb2.CollectResultsResponse(instance_id=instance_id, transcript=transcript)
