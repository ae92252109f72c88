"""AuditRun: what became of every training instance, and whether the run's books are right.

Pages are read while the run goes on; the books are checked in one script (`audit_books.lua`), an atomic look. There all
is counted anew from the instances: their keys are found by a scan, so that one that nothing names is found too.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quartet.v1 import broker_pb2

from quartet_broker import keys, validation
from quartet_broker.runs import Runs, state_value
from quartet_broker.store import Store
from quartet_common.errors import resource_exhausted

_PAGE = 1000
_AT_ONCE = 4  # each holds the ids of all instances
_RETRY_SECONDS = 2.0
_SCANNED = 1000

# Counts of what is there now, made anew; the others of RunStats are kept since the run began.
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
# STATE|digest|attempt|step|data pass; the last came later.
_LINE = re.compile(rb"(COMMITTED|DROPPED|DELIVERED)\|[^|]*\|(\d+)\|(-?\d+)(?:\|(\d*))?")
_MOST_BAD_LINES = 20
_STATS = [count.name for count in broker_pb2.RunStats.DESCRIPTOR.fields]


@dataclass
class _Found:
    """What a scan of the run's keys found."""

    instances: set[bytes] = field(default_factory=set)
    streams: set[bytes] = field(default_factory=set)
    steps: set[bytes] = field(default_factory=set)
    stored: set[bytes] = field(default_factory=set)
    """Names under which groups' contents are stored."""

    def take(self, found: Iterable[bytes], prefix: bytes) -> list[bytes]:
        """Take keys in; returns the instances that are new."""
        new: list[bytes] = []
        for key in found:
            kind, _, rest = key.removeprefix(prefix).partition(b":")
            if kind == b"i" and rest not in self.instances:
                self.instances.add(rest)
                new.append(rest)
            elif kind in (b"prompts", b"ready") and rest:
                self.streams.add(kind + b":" + rest)
            elif kind == b"batch":
                self.steps.add(rest)
            elif kind in (b"payload", b"transcript"):
                self.stored.add(rest)
        return new

    def arguments(self) -> list[Any]:
        """What `audit_books` takes."""
        lists = (self.streams, self.steps, self.stored, self.instances)
        return [part for names in lists for part in (len(names), *names)]


@dataclass
class _Settled:
    """Settled training instances seen, by state, and lines that cannot be read."""

    ids: set[bytes] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"committed": 0, "dropped": 0})


class Audit:
    """Looks at runs; changes nothing."""

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
            async for answer in self._audit(run_id):
                yield answer
        finally:
            self._under_way -= 1

    async def _audit(self, run_id: str) -> AsyncGenerator[broker_pb2.AuditRunResponse]:
        before = (await self._runs.load(run_id)).stats
        # Those alive first: an instance that is settled meanwhile is then seen twice, not missed.
        found, settled = _Found(), _Settled()
        async for new in self._live_ids(run_id, found):
            for page in _pages(await self._live_records(run_id, new)):
                yield page
        async for lines in self._settled_lines(run_id):
            for page in _pages(_settled_records(lines, found.instances, settled)):
                yield page
        yield broker_pb2.AuditRunResponse(summary=await self._summary(run_id, found, settled, before))

    async def _live_ids(self, run_id: str, found: _Found) -> AsyncGenerator[list[bytes]]:
        """Yield the ids of instances not settled, each once, by a scan of all keys."""
        prefix = keys.prefix(run_id)
        async for batch in self._store.scan(run_id):
            yield found.take(batch, prefix.encode())

    async def _live_records(self, run_id: str, ids: list[bytes]) -> list[broker_pb2.InstanceRecord]:
        prefix = keys.prefix(run_id).encode()
        # A group in a batch is trained when its batch is. Read first, so that at worst an older state is told.
        batches, *hashes = await self._store.read(
            [
                ("HGETALL", prefix + b"batches"),
                *(("HMGET", prefix + b"i:" + name, "state", "purpose", "attempt", "step", "pass") for name in ids),
            ]
        )
        records = []
        for name, (state, purpose, attempt, step, data_pass) in zip(ids, hashes, strict=True):
            if purpose != b"TRAIN" or state not in _STATES:
                continue  # what has no state is among the faults
            if state == b"LEASED_TO_TRAINER" and batches.get(step) == b"TRAINED":
                state = b"TRAINED"
            records.append(_record(name, state, attempt, step, data_pass))
        return records

    async def _settled_lines(self, run_id: str) -> AsyncIterator[dict[bytes, bytes]]:
        cursor = b"0"
        while True:
            ((cursor, lines),) = await self._store.read(
                [("HSCAN", keys.prefix(run_id) + "settled", cursor, "COUNT", _SCANNED)]
            )
            yield dict(zip(lines[::2], lines[1::2], strict=True))
            if cursor == b"0":
                return

    async def _summary(
        self, run_id: str, found: _Found, settled: _Settled, before: broker_pb2.RunStats
    ) -> broker_pb2.AuditSummary:
        run = await self._runs.load(run_id)
        _, fields, kept_pairs, anew_pairs, faults, more = await self._store.run(
            "audit_books", run_id, *found.arguments()
        )
        kept, anew = _counts(kept_pairs), _counts(anew_pairs)
        state, version, committed, ended, first_pass, settle_to = fields
        run.state, run.prompts_ended = state_value(state), ended == b"1"
        run.policy_version, run.committed_step = int(version), int(committed)
        run.stats.CopyFrom(broker_pb2.RunStats(**{name: kept.get(name, 0) for name in _STATS}))
        recounted = broker_pb2.RunStats()
        recounted.CopyFrom(run.stats)
        for name in _NOW:
            setattr(recounted, name, anew.get(name, 0))
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
        summary.faults.extend(_differences(kept, anew))
        summary.faults.extend(settled.faults)
        summary.faults.extend(_settled_faults(settled.counts, forgotten, before, run.stats))
        return summary


def _pages(records: list[broker_pb2.InstanceRecord]) -> Iterator[broker_pb2.AuditRunResponse]:
    for start in range(0, len(records), _PAGE):
        page = broker_pb2.AuditPage(instances=records[start : start + _PAGE])
        yield broker_pb2.AuditRunResponse(page=page)


def _settled_records(lines: dict[bytes, bytes], live: set[bytes], settled: _Settled) -> list[broker_pb2.InstanceRecord]:
    """The training instances among settled lines, each once."""
    records = []
    for name, line in lines.items():
        read = _LINE.fullmatch(line)
        if read is None:
            if len(settled.faults) < _MOST_BAD_LINES:
                shown = line[:80].decode(errors="replace")
                settled.faults.append(f"{name.decode()} is settled as '{shown}', which means nothing")
            continue
        state, attempt, step, data_pass = read.groups()
        if state == b"DELIVERED" or name in settled.ids:
            continue
        settled.ids.add(name)
        settled.counts[state.decode().lower()] += 1
        if name not in live:
            records.append(_record(name, state, attempt, step, data_pass))
    return records


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


def _differences(kept: dict[str, int], anew: dict[str, int]) -> Iterator[str]:
    passes = sorted({name for name in (*kept, *anew) if name.startswith("pass ")})
    for name in (*_NOW, "open_bytes", "unscored_bytes", "prompt_bytes", *passes):
        if kept.get(name, 0) != anew.get(name, 0):
            what = f"instances alive of data {name}" if name in passes else name
            yield f"{what}: the broker counts {kept.get(name, 0)}, there are {anew.get(name, 0)}"


def _settled_faults(
    seen: dict[str, int], forgotten: int, before: broker_pb2.RunStats, after: broker_pb2.RunStats
) -> Iterator[str]:
    """Settled instances are walked while the run goes on: at least those settled before, at most those after it."""
    for name, count in seen.items():
        if count > getattr(after, name):
            yield f"{name}: the broker counts {getattr(after, name)}, {count} are remembered as such"
    least = before.committed + before.dropped
    if sum(seen.values()) + forgotten < least:
        yield (
            f"the broker counts {least} groups committed or dropped; {sum(seen.values())} of them are remembered and "
            f"{forgotten} forgotten"
        )
