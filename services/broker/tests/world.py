"""A run and those who work for it, in few words: what the tests are written in."""

import grpc
import pytest
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import common_pb2, experience_pb2

from quartet_broker import keys
from quartet_common.durations import to_duration

TRAIN, EVALUATE, SERVE = (
    experience_pb2.PURPOSE_TRAIN,
    experience_pb2.PURPOSE_EVALUATE,
    experience_pb2.PURPOSE_SERVE,
)


def instance(name: str, text: str = "1+1=?", purpose: int = TRAIN, **fields) -> experience_pb2.PromptInstance:
    return experience_pb2.PromptInstance(
        instance_id=name, prompt=experience_pb2.Prompt(prompt_id=name, text=text), purpose=purpose, **fields
    )


def group(lease, version: int = 0, newest: int | None = None, size: int = 100) -> pb.PutGroup:
    """A finished group for a lease; its transcript names the instance, its tensors are `size` bytes."""
    header = experience_pb2.GroupHeader(
        instance_id=lease.instance.instance_id,
        purpose=lease.instance.purpose,
        min_policy_version=version,
        max_policy_version=version if newest is None else newest,
        completions=8,
        attempt=lease.attempt,
    )
    transcript = experience_pb2.GroupTranscript(instance=lease.instance, prompt_text="seen")
    return pb.PutGroup(
        lease_id=lease.lease_id,
        group=experience_pb2.ExperienceGroup(
            header=header, tensors=bytes(size), transcript=transcript.SerializeToString()
        ),
    )


async def refused(call, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION, *words: str) -> str:
    """Make a call, which must be refused with a code and a sentence that has these words; return the sentence."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    details = caught.value.details()
    assert caught.value.code() is code and all(word in details for word in words), caught.value
    return details


class World:
    """One run through a stub. `redis` is for looking, and for what tests do to time."""

    def __init__(self, stub, redis, run_id: str):
        self.stub = stub
        self.redis = redis
        self.run_id = run_id
        self.session = 0

    async def create(self, members=("r1",), **spec) -> pb.Run:
        """Make the run: groups of one batch are 2, no staleness, unless said otherwise."""
        spec = {"groups_per_step": 2, "max_staleness": 0, "max_deliveries": 3} | spec
        response = await self.stub.CreateRun(pb.CreateRunRequest(spec=pb.RunSpec(run_id=self.run_id, **spec)))
        for member in members:
            await self.register(member)
        return response.run

    async def register(self, name: str, kind=common_pb2.SERVICE_KIND_ROLLOUT, **fields):
        fields = {"address": "127.0.0.1:1", "state": pb.MEMBER_STATE_ACTIVE} | fields
        member = pb.Member(instance_id=name, kind=kind, **fields)
        return await self.stub.RegisterMember(pb.RegisterMemberRequest(run_id=self.run_id, member=member))

    async def submit(self, *names: str, purpose: int = TRAIN, evaluation_set: str = "", **fields):
        instances = [instance(name, purpose=purpose, **fields) for name in names]
        return await self.stub.SubmitPrompts(
            pb.SubmitPromptsRequest(run_id=self.run_id, instances=instances, evaluation_set=evaluation_set)
        )

    async def end_prompts(self) -> None:
        await self.stub.EndPrompts(pb.EndPromptsRequest(run_id=self.run_id))

    async def ask(self, most: int = 100, version: int = 0, wait: float = 0, holder: str = "r1"):
        """LeasePrompts, whole response."""
        return await self.stub.LeasePrompts(
            pb.LeasePromptsRequest(
                run_id=self.run_id, holder=holder, max_prompts=most, policy_version=version, wait=to_duration(wait)
            ),
            timeout=60,
        )

    async def lease(self, most: int = 100, version: int = 0, **more) -> list[pb.PromptLease]:
        return list((await self.ask(most, version, **more)).leases)

    async def names(self, **ask) -> list[str]:
        """The ids of what is leased."""
        return [lease.instance.instance_id for lease in await self.lease(**ask)]

    async def put(self, *groups: pb.PutGroup) -> list[str]:
        response = await self.stub.PutExperience(pb.PutExperienceRequest(run_id=self.run_id, groups=groups))
        return [pb.PutOutcome.Name(outcome).removeprefix("PUT_OUTCOME_") for outcome in response.outcomes]

    async def roll_out(self, most: int = 100, version: int = 0) -> list[str]:
        """Lease and answer at once; the ids that were accepted."""
        leases = await self.lease(most, version)
        if leases:
            assert await self.put(*(group(lease, version) for lease in leases)) == ["ACCEPTED"] * len(leases)
        return [lease.instance.instance_id for lease in leases]

    async def release(self, lease_id: str, failure: str = "", permanent: bool = False):
        release = pb.LeaseRelease(lease_id=lease_id, failure=failure, permanent=permanent)
        return await self.stub.ReleaseLeases(pb.ReleaseLeasesRequest(run_id=self.run_id, releases=[release]))

    async def expire_leases(self) -> None:
        """Let all prompt leases end now: as if their ttl had passed."""
        key = keys.prefix(self.run_id) + "leases"
        leases = await self.redis.zrange(key, 0, -1)
        if leases:
            await self.redis.zadd(key, dict.fromkeys(leases, 1), xx=True)

    async def states(self, names: list[str]) -> dict[str, tuple[str, int]]:
        """State and deliveries of many instances, straight from Redis."""
        prefix = keys.prefix(self.run_id)
        async with self.redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hmget(f"{prefix}i:{name}", "state", "attempt", "step")
                pipeline.hget(f"{prefix}settled", name)
            pipeline.hgetall(f"{prefix}batches")
            *found, batches = await pipeline.execute()
        lives = {}
        for name, (state, attempt, step), settled in zip(names, found[::2], found[1::2], strict=True):
            if state is None:
                state, _, attempt, *_ = settled.split(b"|")
            elif state == b"LEASED_TO_TRAINER" and batches[step] == b"TRAINED":
                state = b"TRAINED"  # whether a step was trained stands with its batch
            lives[name] = state.decode(), int(attempt)
        return lives

    async def queue(self, stream: str) -> list[str]:
        """The instances that wait in a stream, in order."""
        key = keys.prefix(self.run_id) + stream
        if not await self.redis.exists(key):
            return []
        entries = await self.redis.xrange(key)
        pending = {entry["message_id"] for entry in await self.redis.xpending_range(key, "rollouts", "-", "+", 1000)}
        return [fields[b"i"].decode() for entry_id, fields in entries if entry_id not in pending]

    async def open(self, checkpoint: int = 0, consumed=(), holder: str = "t1", **more) -> pb.OpenSessionResponse:
        request = pb.OpenSessionRequest(
            run_id=self.run_id, holder=holder, checkpoint_step=checkpoint, consumed_instance_ids=consumed, **more
        )
        response = await self.stub.OpenSession(request)
        self.session = response.session_epoch
        return response

    async def take(self, step: int, wait: float = 0, session: int | None = None, most: int = 0):
        """LeaseExperience: (manifest, groups), or with `most` (manifest, lists of groups that came together)."""
        call = self.stub.LeaseExperience(
            pb.LeaseExperienceRequest(
                run_id=self.run_id,
                session_epoch=self.session if session is None else session,
                step=step,
                wait=to_duration(wait),
                max_groups_per_message=most,
            ),
            timeout=60,
        )
        parts = [part async for part in call]
        if most:
            return parts[0].manifest, [list(part.groups.groups) for part in parts[1:]]
        return parts[0].manifest, [part.group for part in parts[1:]]

    async def batch(self, step: int) -> list[str]:
        """The ids of a step's batch, which must be granted, with all its groups in order."""
        manifest, groups = await self.take(step)
        assert manifest.granted, manifest
        assert [group.header.instance_id for group in groups] == list(manifest.instance_ids)
        return list(manifest.instance_ids)

    async def train(self, step: int) -> list[str]:
        """Take a step's batch and say that it is trained; its ids."""
        ids = await self.batch(step)
        await self.trained(step)
        return ids

    async def drop(self, step: int, *names: str) -> int:
        response = await self.stub.DropExperience(
            pb.DropExperienceRequest(
                run_id=self.run_id, session_epoch=self.session, step=step, instance_ids=names, reason="zero variance"
            )
        )
        return response.dropped

    async def trained(self, step: int, session: int | None = None, ids=()) -> int:
        session = self.session if session is None else session
        request = pb.MarkTrainedRequest(run_id=self.run_id, session_epoch=session, step=step, instance_ids=ids)
        return (await self.stub.MarkTrained(request)).policy_version

    async def commit(self, step: int, session: int | None = None) -> int:
        response = await self.stub.Commit(
            pb.CommitRequest(run_id=self.run_id, session_epoch=self.session if session is None else session, step=step)
        )
        return response.committed

    async def requeue_dead(self, *names: str) -> int:
        return (await self.stub.RequeueDead(pb.RequeueDeadRequest(run_id=self.run_id, instance_ids=names))).requeued

    async def start_evaluation(self, version: int, name: str = "heldout") -> pb.StartEvaluationResponse:
        request = pb.StartEvaluationRequest(run_id=self.run_id, evaluation_set=name, policy_version=version)
        return await self.stub.StartEvaluation(request)

    async def faults(self) -> list[str]:
        """What AuditRun finds wrong."""
        parts = [part async for part in self.stub.AuditRun(pb.AuditRunRequest(run_id=self.run_id), timeout=120)]
        return list(parts[-1].summary.faults)

    async def finish(self, state=pb.RUN_STATE_SUCCEEDED, reason: str = "", ending=pb.RUN_ENDING_UNSPECIFIED):
        request = pb.FinishRunRequest(run_id=self.run_id, state=state, reason=reason, ending=ending)
        return await self.stub.FinishRun(request)

    async def run(self) -> pb.Run:
        return (await self.stub.GetRun(pb.GetRunRequest(run_id=self.run_id))).run

    async def stats(self) -> pb.RunStats:
        return (await self.run()).stats

    async def state_of(self, name: str) -> str:
        response = await self.stub.GetGroup(pb.GetGroupRequest(run_id=self.run_id, instance_id=name))
        return pb.GroupState.Name(response.state).removeprefix("GROUP_STATE_")
