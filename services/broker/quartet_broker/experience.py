"""Finished groups on their way to the trainer: PutExperience, LeaseExperience, DropExperience."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import grpc
from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys, scripts, validation
from quartet_broker.config import BrokerSection
from quartet_broker.metrics import GROUPS_PUT
from quartet_broker.notifier import Notifier
from quartet_broker.prompts import purpose_name
from quartet_broker.recent import Group, RecentGroups
from quartet_broker.sessions import refuse
from quartet_broker.store import Store, Value
from quartet_broker.traces import trace_puts, trace_ready
from quartet_common.errors import aborted, invalid_argument
from quartet_server.wire import Bytes, Put, PutRequest, one_group, several_groups

# A batch is read from Redis and sent in messages of at most this size; a larger group is sent alone.
_MESSAGE_BYTES = 2 << 20
_MOST_GROUPS = 256
_DROPPED_AT_ONCE = 250  # Redis answers others in between


class Experience:
    """Ready groups, and the batches made of them."""

    def __init__(self, store: Store, notifier: Notifier, section: BrokerSection):
        self._store = store
        self._notifier = notifier
        self._samples = section.sample_events_per_step
        self._recent = RecentGroups()

    async def put(self, request: PutRequest) -> broker_pb2.PutExperienceResponse:
        """Store finished groups and settle their leases, each group atomically."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("groups", request.groups, 256)
        for n, put in enumerate(request.groups):
            _check(n, put.header)
        began = time.time()
        answers = await self._put(run_id, request.groups)
        trace_puts(run_id, request.groups, answers, began)
        counted: Counter[str] = Counter()
        response = broker_pb2.PutExperienceResponse()
        for answer in answers:
            outcome = answer.decode()
            outcome = "FINISHED" if outcome == "RUN_FINISHED" else outcome
            response.outcomes.append(broker_pb2.PutOutcome.Value(f"PUT_OUTCOME_{outcome}"))
            counted[outcome.lower()] += 1
        for outcome, number in counted.items():
            GROUPS_PUT.labels(run_id, outcome).inc(number)
        return response

    async def _put(self, run_id: str, groups: Sequence[Put]) -> list[bytes]:
        """Store the groups' bytes and run the script that accepts them, in one round trip; return each outcome."""
        prefix, nonce = keys.prefix(run_id), secrets.token_hex(8)
        values: dict[str, Bytes] = {}
        ready: dict[bytes, Group] = {}
        arguments: list[Value] = [self._samples]
        for n, put in enumerate(groups):
            header, name, transcript = put.header, f"{nonce}-{n}", put.transcript
            trains = header.purpose == experience_pb2.PURPOSE_TRAIN
            payload: Bytes = b""
            if trains:
                # Stored as it will be sent to the trainer, without the transcript.
                payload = values[f"{prefix}payload:{name}"] = put.stored
                ready[name.encode()] = payload, transcript or None
            if transcript:
                values[f"{prefix}transcript:{name}"] = transcript
            arguments += (
                header.instance_id,
                put.lease_id,
                purpose_name(header.purpose),
                header.min_policy_version,
                header.max_policy_version,
                b"" if trains else header.SerializeToString(),
                name,
                len(payload),
                len(transcript),
                f"{header.ans_acc:.6g}" if header.completions > header.unjudged else "",
            )
        word, *answer = await self._store.run(scripts.PUT_EXPERIENCE, run_id, *arguments, values=values)
        if word == b"PURPOSE":
            index, purpose = answer
            raise invalid_argument(
                f"groups[{index}].group.header.purpose",
                came=experience_pb2.Purpose.Name(groups[index].header.purpose),
                allowed=f"PURPOSE_{purpose.decode()}, the instance's",
            )
        if answer.count(b"ACCEPTED") == len(ready) == len(groups):  # slices of a request that has nothing else
            self._recent.keep(nonce, ready)
        return answer

    async def lease(
        self, request: broker_pb2.LeaseExperienceRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[broker_pb2.LeaseExperienceResponse | bytes]:
        """Wait until a step's batch is whole; yield its manifest, then its groups."""
        run_id = validation.name("run_id", request.run_id)
        validation.version("step", request.step)
        most = validation.integer("max_groups_per_message", request.max_groups_per_message, 0, _MOST_GROUPS)
        until = validation.deadline("wait", request.wait, context)
        waiter = self._notifier.waiter(run_id, "experience")
        while True:
            waiter.clear()
            reply = await self._store.run(scripts.LEASE_EXPERIENCE, run_id, request.session_epoch, request.step)
            manifest, stored = _manifest(run_id, request.step, reply)
            decided = manifest.granted or manifest.end_of_data or manifest.run_finished
            if decided or not await waiter.wait(until):
                break
        yield broker_pb2.LeaseExperienceResponse(manifest=manifest)
        async for groups in self._groups(run_id, stored, most or _MOST_GROUPS):
            if not manifest.replayed:
                await trace_ready(self._store, run_id, request.step, [payload for payload, _ in groups])
            if most:
                yield several_groups(groups)
            else:
                for payload, transcript in groups:
                    yield one_group(payload, transcript)

    async def _groups(self, run_id: str, stored: Sequence[tuple[bytes, int]], most: int) -> AsyncIterator[list[Group]]:
        """Yield payloads and transcripts of a batch, message by message; the next is read while one is sent."""
        reading: asyncio.Task[list[Group]] | None = None
        try:
            for names in _messages(stored, most):
                groups = await reading if reading is not None else []
                reading = asyncio.create_task(self._read_groups(run_id, names))
                if groups:
                    yield groups
            if reading is not None:
                yield await reading
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _read_groups(self, run_id: str, names: list[bytes]) -> list[Group]:
        prefix = keys.prefix(run_id).encode()
        found = {name: self._recent.take(name) for name in names}
        if absent := [name for name, group in found.items() if group is None]:
            payloads, transcripts = await self._store.read(
                [("MGET", *(prefix + kind + name for name in absent)) for kind in (b"payload:", b"transcript:")]
            )
            if None in payloads:
                raise aborted(f"batch of run '{run_id}'", "a group left it while it was sent; ask again")
            found |= dict(zip(absent, zip(payloads, transcripts, strict=True), strict=True))
        return [group for group in found.values() if group is not None]

    async def drop(self, request: broker_pb2.DropExperienceRequest) -> broker_pb2.DropExperienceResponse:
        """Take groups out of a step's batch for good; the batch is topped up when it is asked for again."""
        run_id = validation.name("run_id", request.run_id)
        validation.version("step", request.step)
        validation.count("instance_ids", request.instance_ids, validation.MOST_IDS, least=0)
        ids, dropped = request.instance_ids, 0
        for start in range(0, max(1, len(ids)), _DROPPED_AT_ONCE):  # without ids too: the session is checked
            portion = ids[start : start + _DROPPED_AT_ONCE]
            reply = await self._store.run(
                scripts.DROP_EXPERIENCE, run_id, request.session_epoch, request.step, request.reason, *portion
            )
            refuse(run_id, request.step, reply)
            dropped += reply[1]
        return broker_pb2.DropExperienceResponse(dropped=dropped)


def _messages(stored: Sequence[tuple[bytes, int]], most: int) -> Iterator[list[bytes]]:
    """Yield the names of each message's groups, at most `most`. `stored`: name and bytes of each group."""
    names: list[bytes] = []
    room = _MESSAGE_BYTES
    for name, group_bytes in stored:
        if names and (len(names) == most or group_bytes > room):
            yield names
            names, room = [], _MESSAGE_BYTES
        names.append(name)
        room -= group_bytes
    if names:
        yield names


def _check(n: int, header: experience_pb2.GroupHeader) -> None:
    field = f"groups[{n}].group.header"
    validation.identifier(f"{field}.instance_id", header.instance_id, most=512)
    if header.purpose not in validation.PURPOSES:
        raise invalid_argument(f"{field}.purpose", came=header.purpose, allowed="the instance's")
    validation.version(f"{field}.min_policy_version", header.min_policy_version)
    validation.version(f"{field}.max_policy_version", header.max_policy_version, header.min_policy_version)
    for name in ("completions", "completion_tokens", "attempt", "unjudged"):
        validation.integer(f"{field}.{name}", getattr(header, name), 0)
    for name in ("reward_mean", "ans_acc"):
        validation.finite(f"{field}.{name}", getattr(header, name))
    validation.finite(f"{field}.reward_std", header.reward_std, least=0)
    for i, mean in enumerate(header.verifiers):
        validation.finite(f"{field}.verifiers[{i}].reward", mean.reward)
        validation.finite(f"{field}.verifiers[{i}].ans_acc", mean.ans_acc)
    validation.stored(field, header)


def _manifest(run_id: str, step: int, reply: list) -> tuple[broker_pb2.BatchManifest, list[tuple[bytes, int]]]:
    """Return the manifest, and for each group the name under which it is stored and its bytes."""
    match reply[0]:
        case b"GRANTED":
            _, replayed, last, *groups = reply
            ids = groups[::3]
            manifest = broker_pb2.BatchManifest(
                granted=True,
                instance_ids=[instance_id.decode() for instance_id in ids],
                ready=len(ids),
                needed=len(ids),
                end_of_data=bool(last),
                replayed=bool(replayed),
            )
            return manifest, list(zip(groups[1::3], map(int, groups[2::3]), strict=True))
        case b"SHORT":
            return broker_pb2.BatchManifest(ready=reply[1], needed=reply[2], end_of_data=bool(reply[3])), []
        case b"ENDED":
            return broker_pb2.BatchManifest(run_finished=True), []
    refuse(run_id, step, reply)
    raise AssertionError(f"unknown answer of lease_experience: {reply[0]!r}")
