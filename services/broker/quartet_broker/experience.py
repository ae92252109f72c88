"""Finished groups on their way to the trainer: PutExperience, LeaseExperience, DropExperience."""

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys, validation
from quartet_broker.bell import Bell
from quartet_broker.config import BrokerSection
from quartet_broker.prompts import purpose_name
from quartet_broker.sessions import refuse
from quartet_broker.store import Store, Value
from quartet_common import metrics
from quartet_common.errors import ContractError, aborted, invalid_argument, unavailable

_PUT = metrics.counter("quartet_broker_groups_put_total", "Groups put by rollouts, by outcome.", ["run", "outcome"])
# About how much of a call is handed to Redis at once.
_SCRIPT_BYTES = 4 << 20
# What is stored for a group that is then not accepted, because the broker died in between, goes after this long.
_EXPIRY_SECONDS = 60
# About how much of a batch is read from Redis, and sent, at once.
_MESSAGE_BYTES = 2 << 20
_FIRST_WINDOW = 8
_MOST_RUNS = 256
_MOST_GROUPS = 256


class Experience:
    """Ready groups, and the batches made of them."""

    def __init__(self, store: Store, bell: Bell, section: BrokerSection):
        self._store = store
        self._bell = bell
        self._samples = section.sample_events_per_step
        # Groups of a run are alike: what those of its last batch came to tells how many make a message.
        self._group_bytes: dict[str, int] = {}

    async def put(self, request: broker_pb2.PutExperienceRequest) -> broker_pb2.PutExperienceResponse:
        """Store finished groups and settle their leases, each group atomically."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("groups", request.groups, 256)
        for n, put in enumerate(request.groups):
            _check(f"groups[{n}].group.header", put.group.header)
        answers: list[bytes] = []
        for groups in _portions(request.groups):
            answers += await self._put(run_id, groups)
        counted: Counter[str] = Counter()
        response = broker_pb2.PutExperienceResponse()
        for n, answer in enumerate(answers):
            outcome, _, purpose = answer.decode().partition(" ")
            if outcome == "PURPOSE":
                came = purpose_name(request.groups[n].group.header.purpose)
                raise invalid_argument(
                    f"groups[{n}].group.header.purpose", came=came, allowed=f"PURPOSE_{purpose}, the instance's"
                )
            if outcome == "EXPIRED":
                raise unavailable("broker", "it was held up for too long; nothing was changed of this group; retry")
            outcome = "FINISHED" if outcome == "RUN_FINISHED" else outcome
            response.outcomes.append(broker_pb2.PutOutcome.Value(f"PUT_OUTCOME_{outcome}"))
            counted[outcome.lower()] += 1
        for outcome, number in counted.items():
            _PUT.labels(run_id, outcome).inc(number)
        return response

    async def _put(self, run_id: str, groups: Sequence[broker_pb2.PutGroup]) -> list[bytes]:
        """Put some groups; return the outcome of each."""
        prefix, nonce = keys.prefix(run_id), secrets.token_hex(8)
        parts: list[tuple[Value, ...]] = []
        arguments: list[Value] = [self._samples]
        for n, put in enumerate(groups):
            header, name, transcript = put.group.header, f"{nonce}-{n}", put.group.transcript
            trains = header.purpose == experience_pb2.PURPOSE_TRAIN
            payload = b""
            if trains:
                # What is in it is between rollout and trainer: kept as it will be sent, but for the transcript.
                put.group.ClearField("transcript")
                payload = put.group.SerializeToString()
                parts.append(("SET", f"{prefix}payload:{name}", payload, "EX", _EXPIRY_SECONDS))
            if transcript:
                parts.append(("SET", f"{prefix}transcript:{name}", transcript, "EX", _EXPIRY_SECONDS))
            arguments += (
                header.instance_id,
                put.lease_id,
                purpose_name(header.purpose),
                header.min_policy_version,
                header.max_policy_version,
                b"" if trains else header.SerializeToString(),
                name,
                len(payload) + len(transcript),
            )
        try:
            _, *outcomes = await self._store.run("put_experience", run_id, *arguments, before=parts)
        except ContractError as error:
            if error.code is grpc.StatusCode.NOT_FOUND:  # else it may have been done: what was not expires
                await self._store.read([("UNLINK", *(part[1] for part in parts))])
            raise
        return outcomes

    async def lease(
        self, request: broker_pb2.LeaseExperienceRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[broker_pb2.LeaseExperienceResponse]:
        """Yield the manifest of a step's batch, waiting until it is whole, then its groups."""
        run_id = validation.name("run_id", request.run_id)
        validation.integer("step", request.step, 0)
        most = validation.integer("max_groups_per_message", request.max_groups_per_message, 0, _MOST_GROUPS)
        until = validation.deadline("wait", request.wait, context)
        with self._bell.waiter(run_id, "experience") as waiter:
            while True:
                waiter.clear()
                reply = await self._store.run("lease_experience", run_id, request.session_epoch, request.step)
                manifest, names = _manifest(run_id, request.step, reply)
                decided = manifest.granted or manifest.end_of_data or manifest.run_finished
                if decided or not await waiter.wait(until):
                    break
        yield broker_pb2.LeaseExperienceResponse(manifest=manifest)
        if most:
            async for message in self._messages(run_id, names, most):
                yield message
            return
        async for message in self._messages(run_id, names, _MOST_GROUPS):
            for group in message.groups.groups:
                yield broker_pb2.LeaseExperienceResponse(group=group)

    async def _messages(
        self, run_id: str, names: list[bytes], most: int
    ) -> AsyncIterator[broker_pb2.LeaseExperienceResponse]:
        """Yield a batch's groups, at most `most` and about a message's bytes at a time."""
        start = 0
        while start < len(names):
            group_bytes = self._group_bytes.get(run_id, _MESSAGE_BYTES // _FIRST_WINDOW)
            part = names[start : start + max(1, min(most, _MESSAGE_BYTES // max(1, group_bytes)))]
            start += len(part)
            message = await self._read_groups(run_id, part)
            self._group_bytes.pop(run_id, None)
            self._group_bytes[run_id] = message.ByteSize() // len(part)
            if len(self._group_bytes) > _MOST_RUNS:
                del self._group_bytes[next(iter(self._group_bytes))]
            yield message

    async def _read_groups(self, run_id: str, names: list[bytes]) -> broker_pb2.LeaseExperienceResponse:
        prefix = keys.prefix(run_id).encode()
        payloads, transcripts = await self._store.read(
            ("MGET", *(prefix + kind + name for name in names)) for kind in (b"payload:", b"transcript:")
        )
        message = broker_pb2.LeaseExperienceResponse()
        for payload, transcript in zip(payloads, transcripts, strict=True):
            if payload is None:
                raise aborted(f"batch of run '{run_id}'", "a group left it while it was sent; ask again")
            # Made in its place: a message that is put into another one is copied, payload and all.
            group = message.groups.groups.add()
            group.ParseFromString(payload)
            if transcript is not None:
                group.transcript = transcript
        return message

    async def drop(self, request: broker_pb2.DropExperienceRequest) -> broker_pb2.DropExperienceResponse:
        """Take groups out of a step's batch for good; the batch is topped up when it is asked for again."""
        run_id = validation.name("run_id", request.run_id)
        validation.integer("step", request.step, 0)
        reply = await self._store.run(
            "drop_experience", run_id, request.session_epoch, request.step, *request.instance_ids
        )
        refuse(run_id, request.step, reply)
        return broker_pb2.DropExperienceResponse(dropped=reply[1])


def _check(field: str, header: experience_pb2.GroupHeader) -> None:
    validation.identifier(f"{field}.instance_id", header.instance_id, most=512)
    if header.purpose not in experience_pb2.Purpose.values():
        raise invalid_argument(f"{field}.purpose", came=header.purpose, allowed="the instance's")
    validation.integer(f"{field}.min_policy_version", header.min_policy_version, 0)
    validation.integer(f"{field}.max_policy_version", header.max_policy_version, header.min_policy_version)


def _portions(groups: Sequence[broker_pb2.PutGroup]) -> Iterator[Sequence[broker_pb2.PutGroup]]:
    """Yield some of the groups at a time."""
    first = size = 0
    for n, put in enumerate(groups):
        size += put.ByteSize()
        if size >= _SCRIPT_BYTES:
            yield groups[first : n + 1]
            first, size = n + 1, 0
    if first < len(groups):
        yield groups[first:]


def _manifest(run_id: str, step: int, reply: list) -> tuple[broker_pb2.BatchManifest, list[bytes]]:
    """Return the manifest, and the names under which its groups are stored."""
    match reply[0]:
        case b"GRANTED":
            _, replayed, last, *groups = reply
            ids, names = groups[::2], groups[1::2]
            manifest = broker_pb2.BatchManifest(
                granted=True,
                instance_ids=[instance_id.decode() for instance_id in ids],
                ready=len(ids),
                needed=len(ids),
                end_of_data=bool(last),
                replayed=bool(replayed),
            )
            return manifest, names
        case b"SHORT":
            return broker_pb2.BatchManifest(ready=reply[1], needed=reply[2], end_of_data=bool(reply[3])), []
        case b"ENDED":
            return broker_pb2.BatchManifest(run_finished=True), []
    refuse(run_id, step, reply)
    raise AssertionError(f"unknown answer of lease_experience: {reply[0]!r}")
