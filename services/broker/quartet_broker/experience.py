"""Finished groups on their way to the trainer: PutExperience, LeaseExperience, DropExperience."""

from collections.abc import AsyncIterator

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
# Groups read from Redis at once while a batch is sent.
_WINDOW = 8


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
        calls = [self._put_arguments(f"groups[{n}]", put) for n, put in enumerate(request.groups)]
        replies = await self._store.run_many("put_experience", run_id, calls)
        response = broker_pb2.PutExperienceResponse()
        for n, reply in enumerate(replies):
            outcome = reply[0].decode()
            if outcome == "PURPOSE":
                allowed = f"PURPOSE_{reply[1].decode()}, the instance's"
                raise invalid_argument(f"groups[{n}].group.header.purpose", came=calls[n][2], allowed=allowed)
            outcome = "FINISHED" if outcome == "RUN_FINISHED" else outcome
            response.outcomes.append(broker_pb2.PutOutcome.Value(f"PUT_OUTCOME_{outcome}"))
            _PUT.labels(run_id, outcome.lower()).inc()
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
            self._samples,
        )

    async def lease(
        self, request: broker_pb2.LeaseExperienceRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[broker_pb2.LeaseExperienceResponse]:
        """Yield the manifest of a step's batch, waiting until it is whole, then its groups."""
        run_id = validation.name("run_id", request.run_id)
        validation.integer("step", request.step, 0)
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
        async for group in self._groups(run_id, list(manifest.instance_ids)):
            yield broker_pb2.LeaseExperienceResponse(group=group)

    async def _groups(self, run_id: str, instance_ids: list[str]) -> AsyncIterator[experience_pb2.ExperienceGroup]:
        prefix = keys.prefix(run_id)
        for start in range(0, len(instance_ids), _WINDOW):
            window = instance_ids[start : start + _WINDOW]
            replies = await self._store.read(
                ("HMGET", f"{prefix}i:{instance_id}", "header", "tensors", "transcript") for instance_id in window
            )
            for instance_id, (header, tensors, transcript) in zip(window, replies, strict=True):
                if header is None:
                    raise aborted(f"group '{instance_id}'", "it left the batch while the batch was sent; ask again")
                yield experience_pb2.ExperienceGroup(
                    header=experience_pb2.GroupHeader.FromString(header), tensors=tensors, transcript=transcript
                )

    async def drop(self, request: broker_pb2.DropExperienceRequest) -> broker_pb2.DropExperienceResponse:
        """Take groups out of a step's batch for good; the batch is topped up when it is asked for again."""
        run_id = validation.name("run_id", request.run_id)
        validation.integer("step", request.step, 0)
        reply = await self._store.run(
            "drop_experience", run_id, request.session_epoch, request.step, *request.instance_ids
        )
        refuse(run_id, request.step, reply)
        return broker_pb2.DropExperienceResponse(dropped=reply[1])


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
