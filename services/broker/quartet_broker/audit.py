"""AuditRun: the state of every training instance, and a check of the run's books.

Pages are read while the run goes on; then one script (`audit_books.lua`) checks the books atomically. It recounts
everything from the instances, whose keys come from a scan, so that an instance which no list names is found too.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from quartet.v1 import broker_pb2

from quartet_broker import keys, scripts, validation
from quartet_broker.runs import Runs, state_value
from quartet_broker.store import Store, Value
from quartet_common.errors import resource_exhausted

_PAGE = 1000
_AT_ONCE = 4  # each holds the ids of all instances
_RETRY_SECONDS = 2.0
_SCANNED = 1000

# Counts of what exists now, which the audit recounts; the other RunStats are totals since the run began.
_NOW = (
    "queued",
    "leased",
    "ready",
    "leased_to_trainer",
    "trained",
    "dead",
    "experience_bytes",
    "untrained_in_flight",
)
_STATES = {name.removeprefix("GROUP_STATE_").encode(): value for name, value in broker_pb2.GroupState.items()}
# STATE|digest|attempt|step|data pass; older lines have no data pass.
_LINE = re.compile(rb"(COMMITTED|DROPPED|DELIVERED)\|[^|]*\|(\d+)\|(-?\d+)(?:\|(\d*))?")
_MOST_BAD_LINES = 20
_FIELDS = ("state", "purpose", "attempt", "step", "pass")
_STATS = [count.name for count in broker_pb2.RunStats.DESCRIPTOR.fields]


class Audit:
    """Audits runs; reads only."""

    def __init__(self, store: Store, runs: Runs):
        self._store = store
        self._runs = runs
        self._under_way = 0

    async def run(self, request: broker_pb2.AuditRunRequest) -> AsyncGenerator[broker_pb2.AuditRunResponse]:
        """Yield pages of instances, then the summary. Raises NOT_FOUND, RESOURCE_EXHAUSTED."""
        run_id = validation.name("run_id", request.run_id)
        if self._under_way >= _AT_ONCE:
            raise resource_exhausted("audits", f"{_AT_ONCE} are under way, the most at once", _RETRY_SECONDS)
        self._under_way += 1
        try:
            before = (await self._runs.load(run_id)).stats
            audit = _RunAudit(self._store, run_id)
            # Live instances first: one that is settled meanwhile is then seen twice, not missed.
            for records in audit.live, audit.settled:
                async for found in records():
                    for start in range(0, len(found), _PAGE):
                        page = broker_pb2.AuditPage(instances=found[start : start + _PAGE])
                        yield broker_pb2.AuditRunResponse(page=page)
            summary = await audit.summary(await self._runs.load(run_id), before)
            yield broker_pb2.AuditRunResponse(summary=summary)
        finally:
            self._under_way -= 1


class _RunAudit:
    """One audit: what it has read of the run so far."""

    def __init__(self, store: Store, run_id: str):
        self._store = store
        self._run_id = run_id
        self._prefix = keys.prefix(run_id).encode()
        self._instances: set[bytes] = set()
        self._streams: set[bytes] = set()
        self._steps: set[bytes] = set()
        self._stored: set[bytes] = set()  # names under which groups' contents are stored
        self._settled: set[bytes] = set()
        self._settled_counts = {"committed": 0, "dropped": 0}
        self._faults: list[str] = []  # settled lines that cannot be read

    async def live(self) -> AsyncIterator[list[broker_pb2.InstanceRecord]]:
        """Yield the training instances that are not settled, each once, found by a scan of all keys."""
        async for found in self._store.scan(self._run_id):
            new: list[bytes] = []
            for key in found:
                kind, _, rest = key.removeprefix(self._prefix).partition(b":")
                if kind == b"i" and rest not in self._instances:
                    self._instances.add(rest)
                    new.append(rest)
                elif kind in (b"prompts", b"ready") and rest:
                    self._streams.add(kind + b":" + rest)
                elif kind == b"batch":
                    self._steps.add(rest)
                elif kind in (b"payload", b"transcript"):
                    self._stored.add(rest)
            yield await self._live_records(new)

    async def _live_records(self, ids: list[bytes]) -> list[broker_pb2.InstanceRecord]:
        # A group in a batch is trained when its batch is. Batches are read first: at worst an older state is reported.
        batches, *hashes = await self._store.read(
            [
                ("HGETALL", self._prefix + b"batches"),
                *(("HMGET", self._prefix + b"i:" + name, *_FIELDS) for name in ids),
            ]
        )
        records = []
        for name, (state, purpose, attempt, step, data_pass) in zip(ids, hashes, strict=True):
            if purpose != b"TRAIN" or state not in _STATES:
                continue  # the summary reports an instance without a state as a fault
            if state == b"LEASED_TO_TRAINER" and batches.get(step) == b"TRAINED":
                state = b"TRAINED"
            records.append(_record(name, state, attempt, step, data_pass))
        return records

    async def settled(self) -> AsyncIterator[list[broker_pb2.InstanceRecord]]:
        """Yield the training instances that are settled and were not seen alive, each once."""
        cursor = None
        while cursor != b"0":
            scan = ("HSCAN", self._prefix + b"settled", cursor or b"0", "COUNT", _SCANNED)
            ((cursor, lines),) = await self._store.read([scan])
            records = []
            for name, line in zip(lines[::2], lines[1::2], strict=True):
                read = _LINE.fullmatch(line)
                if read is None:
                    if len(self._faults) < _MOST_BAD_LINES:
                        shown = line[:80].decode(errors="replace")
                        self._faults.append(f"{name.decode()} is settled as '{shown}', which means nothing")
                    continue
                state, attempt, step, data_pass = read.groups()
                if state == b"DELIVERED" or name in self._settled:
                    continue
                self._settled.add(name)
                self._settled_counts[state.decode().lower()] += 1
                if name not in self._instances:
                    records.append(_record(name, state, attempt, step, data_pass))
            yield records

    async def summary(self, run: broker_pb2.Run, before: broker_pb2.RunStats) -> broker_pb2.AuditSummary:
        """Check the books in one script; `before`: the run's counts before the first page."""
        lists = (self._streams, self._steps, self._stored, self._instances)
        arguments: list[Value] = []
        for names in lists:
            arguments += [len(names), *names]
        _, fields, kept_pairs, recounted_pairs, faults, more = await self._store.run(
            scripts.AUDIT_BOOKS, self._run_id, *arguments
        )
        kept, recount = _counts(kept_pairs), _counts(recounted_pairs)
        state, version, committed, ended, first_pass, settle_to = fields
        run.state, run.prompts_ended = state_value(state), ended == b"1"
        run.policy_version, run.committed_step = int(version), int(committed)
        run.stats.CopyFrom(broker_pb2.RunStats(**{name: kept.get(name, 0) for name in _STATS}))
        recounted = broker_pb2.RunStats()
        recounted.CopyFrom(run.stats)
        for name in _NOW:
            setattr(recounted, name, recount.get(name, 0))
        forgotten = kept.get("forgotten", 0)
        summary = broker_pb2.AuditSummary(
            run=run,
            recounted=recounted,
            forgotten=forgotten,
            first_remembered_pass=int(first_pass or 0),
            faults=[fault.decode(errors="replace") for fault in faults],
        )
        if more:
            summary.faults.append(f"and {more} more of these")
        if int(committed) < int(settle_to or 0):
            summary.faults.append(
                f"the books are settled up to step {int(committed)} of {int(settle_to)}: a trainer opens its session "
                "and settles what its checkpoint contains; ask again when it trains"
            )
        summary.faults.extend(_differences(kept, recount))
        summary.faults.extend(self._faults)
        summary.faults.extend(_settled_faults(self._settled_counts, forgotten, before, run.stats))
        return summary


def _record(
    name: bytes, state: bytes, attempt: bytes | None, step: bytes | None, data_pass: bytes | None
) -> broker_pb2.InstanceRecord:
    return broker_pb2.InstanceRecord(
        instance_id=name.decode(),
        state=_STATES[state],
        attempt=int(attempt or 0),
        step=int(step) if step else -1,
        data_pass=int(data_pass or 0),
    )


def _counts(pairs: list[bytes]) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in zip(pairs[::2], pairs[1::2], strict=True)}


def _differences(kept: dict[str, int], recount: dict[str, int]) -> Iterator[str]:
    passes = sorted({name for name in (*kept, *recount) if name.startswith("pass ")})
    for name in (*_NOW, "open_bytes", "unscored_bytes", "prompt_bytes", *passes):
        if kept.get(name, 0) != recount.get(name, 0):
            what = f"instances alive of data {name}" if name in passes else name
            yield f"{what}: the broker counts {kept.get(name, 0)}, there are {recount.get(name, 0)}"


def _settled_faults(
    seen: dict[str, int], forgotten: int, before: broker_pb2.RunStats, after: broker_pb2.RunStats
) -> Iterator[str]:
    """Yield faults of the settled counts: at least those `before` the walk and at most those `after` it are right."""
    for name, count in seen.items():
        if count > getattr(after, name):
            yield f"{name}: the broker counts {getattr(after, name)}, {count} are stored as such"
    least = before.committed + before.dropped
    if sum(seen.values()) + forgotten < least:
        yield (
            f"the broker counts {least} groups committed or dropped; {sum(seen.values())} of them are stored and "
            f"{forgotten} deleted"
        )
