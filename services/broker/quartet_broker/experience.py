"""Finished groups on their way to the trainer: PutExperience, LeaseExperience, DropExperience."""

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
from quartet_common.errors import aborted, invalid_argument

_PUT = metrics.counter("quartet_broker_groups_put_total", "Groups put by rollouts, by outcome.", ["run", "outcome"])
# A script's call holds up Redis for everyone: it is given about this much to store.
_SCRIPT_BYTES = 4 << 20
# About how much of a batch is read from Redis, and sent, at once.
_MESSAGE_BYTES = 1 << 20
_FIRST_WINDOW = 8
_MOST_GROUPS = 256


class Experience:
    """Ready groups, and the batches made of them."""

    def __init__(self, store: Store, bell: Bell, section: BrokerSection):
        self._store = store
        self._bell = bell
        self._samples = section.sample_events_per_step

    async def put(self, request: broker_pb2.PutExperienceRequest) -> broker_pb2.PutExperienceResponse:
        """Store finished groups and settle their leases, each group atomically."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("groups", request.groups, 256)
        groups = [self._put_arguments(f"groups[{n}]", put) for n, put in enumerate(request.groups)]
        answers: list[bytes] = []
        for portion in _portions(groups):
            _, *outcomes = await self._store.run("put_experience", run_id, self._samples, *portion)
            answers += outcomes
        counted: Counter[str] = Counter()
        response = broker_pb2.PutExperienceResponse()
        for n, answer in enumerate(answers):
            outcome, _, purpose = answer.decode().partition(" ")
            if outcome == "PURPOSE":
                came = purpose_name(request.groups[n].group.header.purpose)
                raise invalid_argument(
                    f"groups[{n}].group.header.purpose", came=came, allowed=f"PURPOSE_{purpose}, the instance's"
                )
            outcome = "FINISHED" if outcome == "RUN_FINISHED" else outcome
            response.outcomes.append(broker_pb2.PutOutcome.Value(f"PUT_OUTCOME_{outcome}"))
            counted[outcome.lower()] += 1
        for outcome, number in counted.items():
            _PUT.labels(run_id, outcome).inc(number)
        return response

    def _put_arguments(self, field: str, put: broker_pb2.PutGroup) -> tuple[Value, ...]:
        header = put.group.header
        validation.identifier(f"{field}.group.header.instance_id", header.instance_id, most=512)
        if header.purpose not in experience_pb2.Purpose.values():
            raise invalid_argument(f"{field}.group.header.purpose", came=header.purpose, allowed="the instance's")
        validation.integer(f"{field}.group.header.min_policy_version", header.min_policy_version, 0)
        validation.integer(
            f"{field}.group.header.max_policy_version", header.max_policy_version, header.min_policy_version
        )
        return (
            header.instance_id,
            put.lease_id,
            purpose_name(header.purpose),
            header.min_policy_version,
            header.max_policy_version,
            header.SerializeToString(),
            put.group.tensors,
            put.group.transcript,
        )

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
                manifest = _manifest(run_id, request.step, reply)
                decided = manifest.granted or manifest.end_of_data or manifest.run_finished
                if decided or not await waiter.wait(until):
                    break
        yield broker_pb2.LeaseExperienceResponse(manifest=manifest)
        async for groups in self._groups(run_id, list(manifest.instance_ids), most or _MOST_GROUPS):
            if most:
                yield broker_pb2.LeaseExperienceResponse(groups=broker_pb2.ExperienceGroups(groups=groups))
            else:
                for group in groups:
                    yield broker_pb2.LeaseExperienceResponse(group=group)

    async def _groups(
        self, run_id: str, instance_ids: list[str], most: int
    ) -> AsyncIterator[list[experience_pb2.ExperienceGroup]]:
        """Yield a batch's groups, at most `most` and about a message's bytes at a time."""
        window, start = min(most, _FIRST_WINDOW), 0
        while start < len(instance_ids):
            ids = instance_ids[start : start + window]
            start += window
            groups = await self._read_groups(run_id, ids)
            yield groups
            # Groups of a run are alike: what these came to tells how many fit.
            size = sum(len(group.tensors) + len(group.transcript) for group in groups)
            window = max(1, min(most, _MESSAGE_BYTES * len(ids) // max(1, size)))

    async def _read_groups(self, run_id: str, ids: list[str]) -> list[experience_pb2.ExperienceGroup]:
        prefix = keys.prefix(run_id)
        replies = await self._store.read(
            ("HMGET", f"{prefix}i:{instance_id}", "header", "tensors", "transcript") for instance_id in ids
        )
        groups = []
        for instance_id, (header, tensors, transcript) in zip(ids, replies, strict=True):
            if header is None:
                raise aborted(f"group '{instance_id}'", "it left the batch while the batch was sent; ask again")
            groups.append(
                experience_pb2.ExperienceGroup(
                    header=experience_pb2.GroupHeader.FromString(header), tensors=tensors, transcript=transcript
                )
            )
        return groups

    async def drop(self, request: broker_pb2.DropExperienceRequest) -> broker_pb2.DropExperienceResponse:
        """Take groups out of a step's batch for good; the batch is topped up when it is asked for again."""
        run_id = validation.name("run_id", request.run_id)
        validation.integer("step", request.step, 0)
        reply = await self._store.run(
            "drop_experience", run_id, request.session_epoch, request.step, *request.instance_ids
        )
        refuse(run_id, request.step, reply)
        return broker_pb2.DropExperienceResponse(dropped=reply[1])


def _portions(groups: Sequence[tuple[Value, ...]]) -> Iterator[list[Value]]:
    """Yield the script's arguments for some of the groups at a time."""
    portion: list[Value] = []
    size = 0
    for group in groups:
        portion += group
        size += sum(len(part) for part in group if isinstance(part, bytes))
        if size >= _SCRIPT_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _manifest(run_id: str, step: int, reply: list) -> broker_pb2.BatchManifest:
    match reply[0]:
        case b"GRANTED":
            _, replayed, last, *ids = reply
            return broker_pb2.BatchManifest(
                granted=True,
                instance_ids=[instance_id.decode() for instance_id in ids],
                ready=len(ids),
                needed=len(ids),
                end_of_data=bool(last),
                replayed=bool(replayed),
            )
        case b"SHORT":
            return broker_pb2.BatchManifest(ready=reply[1], needed=reply[2], end_of_data=bool(reply[3]))
        case b"ENDED":
            return broker_pb2.BatchManifest(run_finished=True)
    refuse(run_id, step, reply)
    raise AssertionError(f"unknown answer of lease_experience: {reply[0]!r}")
