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

    def call(self, method: str, **fields):
        """Call an RPC about the run, by its name."""
        request = getattr(pb, f"{method}Request")(run_id=self.run_id, **fields)
        return getattr(self.stub, method)(request, timeout=60)

    async def create(self, members=("r1",), **spec) -> pb.Run:
        """Make the run: groups of one batch are 2, no staleness, unless said otherwise.

        Leases and members outlast every test that does not say so: none of them beats, and machines may be slow.
        """
        lasting = dict.fromkeys(("prompt_lease_ttl", "member_ttl"), to_duration(3600))
        spec = {"groups_per_step": 2, "max_staleness": 0, "max_deliveries": 3} | lasting | spec
        response = await self.stub.CreateRun(pb.CreateRunRequest(spec=pb.RunSpec(run_id=self.run_id, **spec)))
        for member in members:
            await self.register(member)
        return response.run

    async def register(self, name: str, kind=common_pb2.SERVICE_KIND_ROLLOUT, **fields):
        fields = {"address": "127.0.0.1:1", "state": pb.MEMBER_STATE_ACTIVE} | fields
        return await self.call("RegisterMember", member=pb.Member(instance_id=name, kind=kind, **fields))

    async def leave(self, name: str) -> int:
        return (await self.call("LeaveMember", instance_id=name)).group_epoch

    async def submit(self, *names: str, purpose: int = TRAIN, evaluation_set: str = "", follows: str = "", **fields):
        instances = [instance(name, purpose=purpose, **fields) for name in names]
        where = {"evaluation_set": evaluation_set, "follows_instance_id": follows}
        return await self.call("SubmitPrompts", instances=instances, **where)

    async def end_prompts(self) -> None:
        await self.call("EndPrompts")

    async def ask(self, most: int = 100, version: int = 0, wait: float = 0, holder: str = "r1"):
        """LeasePrompts, whole response."""
        wanted = {"holder": holder, "max_prompts": most, "policy_version": version, "wait": to_duration(wait)}
        return await self.call("LeasePrompts", **wanted)

    async def lease(self, most: int = 100, version: int = 0, **more) -> list[pb.PromptLease]:
        return list((await self.ask(most, version, **more)).leases)

    async def names(self, **ask) -> list[str]:
        """The ids of what is leased."""
        return [lease.instance.instance_id for lease in await self.lease(**ask)]

    async def put(self, *groups: pb.PutGroup) -> list[str]:
        outcomes = (await self.call("PutExperience", groups=groups)).outcomes
        return [pb.PutOutcome.Name(outcome).removeprefix("PUT_OUTCOME_") for outcome in outcomes]

    async def generate(self, most: int = 100, version: int = 0) -> list[str]:
        """Lease and answer at once; the ids that were accepted."""
        leases = await self.lease(most, version)
        if leases:
            assert await self.put(*(group(lease, version) for lease in leases)) == ["ACCEPTED"] * len(leases)
        return [lease.instance.instance_id for lease in leases]

    async def renew(self, *leases: str) -> pb.RenewLeasesResponse:
        return await self.call("RenewLeases", lease_ids=leases)

    async def release(self, lease_id: str, failure: str = "", permanent: bool = False, unscored: bytes = b""):
        release = pb.LeaseRelease(lease_id=lease_id, failure=failure, permanent=permanent, unscored=unscored)
        return await self.call("ReleaseLeases", releases=[release])

    async def expire_leases(self) -> None:
        """Let all prompt leases end now: as if their ttl had passed."""
        key = keys.prefix(self.run_id) + "leases"
        leases = await self.redis.zrange(key, 0, -1)
        if leases:
            await self.redis.zadd(key, dict.fromkeys(leases, 1), xx=True)

    async def open(self, checkpoint: int = 0, consumed=(), holder: str = "t1", **more) -> pb.OpenSessionResponse:
        what = {"holder": holder, "checkpoint_step": checkpoint, "consumed_instance_ids": consumed}
        response = await self.call("OpenSession", **what, **more)
        self.session = response.session_epoch
        return response

    async def take(self, step: int, wait: float = 0, session: int | None = None, most: int = 0):
        """LeaseExperience: (manifest, groups), or with `most` (manifest, lists of groups that came together)."""
        session = self.session if session is None else session
        what = {"session_epoch": session, "step": step, "wait": to_duration(wait), "max_groups_per_message": most}
        parts = [part async for part in self.call("LeaseExperience", **what)]
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

    async def drop(self, step: int, *names: str, session: int | None = None) -> int:
        session = self.session if session is None else session
        what = {"session_epoch": session, "step": step, "instance_ids": names, "reason": "zero variance"}
        return (await self.call("DropExperience", **what)).dropped

    async def trained(self, step: int, session: int | None = None, ids=()) -> int:
        session = self.session if session is None else session
        return (await self.call("MarkTrained", session_epoch=session, step=step, instance_ids=ids)).policy_version

    async def commit(self, step: int, session: int | None = None) -> int:
        session = self.session if session is None else session
        return (await self.call("Commit", session_epoch=session, step=step)).committed

    async def settle(self, *lines: tuple[int, list[str]]) -> pb.SettleTrainedResponse:
        steps = [pb.TrainedStep(step=step, instance_ids=ids) for step, ids in lines]
        return await self.call("SettleTrained", session_epoch=self.session, steps=steps)

    async def requeue_dead(self, *names: str) -> int:
        return (await self.call("RequeueDead", instance_ids=names)).requeued

    async def start_evaluation(self, version: int, name: str = "heldout") -> pb.StartEvaluationResponse:
        return await self.call("StartEvaluation", evaluation_set=name, policy_version=version)

    async def report(self, **event) -> str:
        """Add an event of a kind; its id."""
        return (await self.call("ReportProgress", event=pb.RunEvent(**event))).event_id

    def watch(self, after: str = "") -> grpc.aio.UnaryStreamCall:
        return self.call("WatchRun", after_event_id=after)

    async def faults(self) -> list[str]:
        """What AuditRun finds wrong."""
        return list([part async for part in self.call("AuditRun")][-1].summary.faults)

    async def finish(self, state=pb.RUN_STATE_SUCCEEDED, reason: str = "", **more) -> pb.Run:
        return (await self.call("FinishRun", state=state, reason=reason, **more)).run

    async def delete(self, force: bool = False) -> bool:
        return (await self.call("DeleteRun", force=force)).deleted

    async def run(self) -> pb.Run:
        return (await self.call("GetRun")).run

    async def stats(self) -> pb.RunStats:
        return (await self.run()).stats

    async def state_of(self, name: str) -> str:
        response = await self.call("GetGroup", instance_id=name)
        return pb.GroupState.Name(response.state).removeprefix("GROUP_STATE_")


async def world_of(stub, servicer, run_id: str) -> World:
    """A run through a stub of a broker, looked at where its keys are."""
    return World(stub, await servicer.store.client(run_id), run_id)
