"""Prompts that were set aside: ListDead, RequeueDead."""

from functools import partial

from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys, pages, validation
from quartet_broker.errors import run_not_found
from quartet_broker.events import timestamp
from quartet_broker.store import Store

# A script holds up Redis for everyone: it requeues this many at most.
_PORTION = 1000
_REASONS = 20  # as life.lua keeps them
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
            values = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            reasons = int(values.get(b"reasons", 0))
            kept = range(max(1, reasons - _REASONS + 1), reasons + 1)
            found.append(
                broker_pb2.DeadPrompt(
                    instance=experience_pb2.PromptInstance.FromString(values[b"prompt"]),
                    attempts=int(values[b"attempt"]),
                    reasons=[values[b"reason:%d" % n].decode() for n in kept],
                    died_at=timestamp(float(died_at)),
                    unscored_bytes=int(values.get(b"bytes", 0)),
                )
            )
        return found

    async def list_dead(self, request: broker_pb2.ListDeadRequest) -> broker_pb2.ListDeadResponse:
        """Return dead prompts, oldest first; of those that are named, if some are."""
        run_id = validation.name("run_id", request.run_id)
        limit = validation.integer("limit", request.limit, 0, 10_000) or 100
        validation.count("instance_ids", request.instance_ids, 1024, least=0)
        behind = pages.read_token(request.page_token)
        least = behind[0] if behind else "-inf"
        most = () if behind or request.instance_ids else ("LIMIT", 0, limit + 1)
        state, total, listed = await self._store.read(
            [
                ("HGET", keys.run(run_id), "state"),
                ("ZCARD", keys.prefix(run_id) + "dead"),
                ("ZRANGEBYSCORE", keys.prefix(run_id) + "dead", least, "+inf", "WITHSCORES", *most),
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
        dead, token = await pages.fill(entries, partial(self.load, run_id), _LISTED_AT_ONCE, self._answer_bytes, limit)
        return broker_pb2.ListDeadResponse(dead=dead, total=total, next_page_token=token)

    async def requeue(self, request: broker_pb2.RequeueDeadRequest) -> broker_pb2.RequeueDeadResponse:
        """Put dead prompts back into the queue; all of them if none is named."""
        run_id = validation.name("run_id", request.run_id)
        ids: list = list(request.instance_ids) or await self._ids(run_id)
        return broker_pb2.RequeueDeadResponse(requeued=await self._requeue(run_id, ids, only_unscored=False))

    async def requeue_unscored(self, run_id: str) -> int:
        """Put those back whose completions are kept, to be scored; return how many."""
        ids = await self._ids(run_id)
        return await self._requeue(run_id, ids, only_unscored=True) if ids else 0

    async def _ids(self, run_id: str) -> list:
        (ids,) = await self._store.read([("ZRANGE", keys.prefix(run_id) + "dead", 0, -1)])
        return ids

    async def _requeue(self, run_id: str, ids: list, only_unscored: bool) -> int:
        requeued = 0
        for start in range(0, max(1, len(ids)), _PORTION):  # none: a run that does not exist is told all the same
            portion = ids[start : start + _PORTION]
            requeued += (await self._store.run("requeue_dead", run_id, "1" if only_unscored else "", *portion))[1]
        return requeued
