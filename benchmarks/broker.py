"""Prompt groups through the broker, beside the same bytes straight through the same Redis.

Ours: groups of 44 KB (8 completions of about 600 tokens, ragged) go put -> lease for a step -> trained -> committed,
32 groups a call and a step as the services do, over gRPC through a broker process. A step's prompts are queued and
leased beforehand, outside the measured time.

Peer: redis-py in this process with the same payloads and batches: pipelined XADD, XREADGROUP, pipelined XACK and XDEL.
It is the least that durable, acknowledged delivery over this Redis can cost: no gRPC, no deduplication, no manifests,
no staleness, and no second process. The ratio is the price of these.

Redis appends to its file and syncs it every second, as the launcher starts it.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import redis
from measuring import Figure, in_turn, report, service
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import broker_pb2_grpc, common_pb2, experience_pb2, tensor_pb2

from quartet_common.channel import connect_sync
from quartet_common.tensors import encode, encode_ragged
from quartet_local.redis import redis_process, wait_until_ready

GROUPS = 32
STEPS_PER_ROUND = 6
ROUNDS = 5
COMPLETIONS = 8
RUN = "bench"


def make_tensors(rng: np.random.Generator) -> bytes:
    """One group as it travels."""
    lengths = rng.integers(400, 829, COMPLETIONS)
    ones = encode(np.ones(COMPLETIONS, dtype=np.float32))
    return experience_pb2.GroupTensors(
        prompt_token_ids=encode(rng.integers(0, 150_000, 100).astype(np.int32)),
        completion_token_ids=encode_ragged(
            [rng.integers(0, 150_000, n).astype(np.int32) for n in lengths], tensor_pb2.DTYPE_INT32
        ),
        rollout_log_probs=encode_ragged(
            [rng.normal(-1, 0.5, n).astype(np.float32) for n in lengths], tensor_pb2.DTYPE_FLOAT32
        ),
        loss_mask=encode_ragged([np.ones(n, dtype=np.uint8) for n in lengths], tensor_pb2.DTYPE_UINT8),
        rewards=ones,
        temperatures=ones,
        truncated=encode(np.zeros(COMPLETIONS, dtype=np.uint8)),
        version_spans=encode_ragged([np.array([0, 0, n], dtype=np.int64) for n in lengths], tensor_pb2.DTYPE_INT64),
        format_acc=ones,
        ans_acc=ones,
    ).SerializeToString()


class Ours:
    """A rollout and a trainer in one, at the broker."""

    def __init__(self, stub: broker_pb2_grpc.BrokerServiceStub, payloads: list[bytes]):
        self._stub, self._payloads, self._step = stub, payloads, 0
        spec = pb.RunSpec(run_id=RUN, group_size=COMPLETIONS, groups_per_step=GROUPS, max_staleness=1)
        stub.CreateRun(pb.CreateRunRequest(spec=spec))
        member = pb.Member(
            instance_id="rollout",
            kind=common_pb2.SERVICE_KIND_ROLLOUT,
            address="127.0.0.1:1",
            state=pb.MEMBER_STATE_ACTIVE,
        )
        self._member = member
        stub.RegisterMember(pb.RegisterMemberRequest(run_id=RUN, member=member))
        self._session = stub.OpenSession(pb.OpenSessionRequest(run_id=RUN, holder="trainer")).session_epoch

    def groups_per_second(self) -> float:
        seconds = sum(self._one_step() for _ in range(STEPS_PER_ROUND))
        return GROUPS * STEPS_PER_ROUND / seconds

    def _one_step(self) -> float:
        request = pb.PutExperienceRequest(run_id=RUN, groups=self._generated())
        place = {"run_id": RUN, "session_epoch": self._session, "step": self._step}
        started = time.perf_counter()
        outcomes = self._stub.PutExperience(request).outcomes
        manifest, *groups = list(self._stub.LeaseExperience(pb.LeaseExperienceRequest(**place)))
        self._stub.MarkTrained(pb.MarkTrainedRequest(**place))
        self._stub.Commit(pb.CommitRequest(**place))
        seconds = time.perf_counter() - started
        if set(outcomes) != {pb.PUT_OUTCOME_ACCEPTED} or not manifest.manifest.granted or len(groups) != GROUPS:
            raise RuntimeError(f"step {self._step} was not granted in full: {manifest}")
        self._step += 1
        return seconds

    def _generated(self) -> list[pb.PutGroup]:
        """Queue and lease a step's prompts, and answer each."""
        instances = [
            experience_pb2.PromptInstance(
                instance_id=f"step-{self._step}/{index}",
                prompt=experience_pb2.Prompt(prompt_id=str(index), text="1+1=?"),
                purpose=experience_pb2.PURPOSE_TRAIN,
            )
            for index in range(GROUPS)
        ]
        self._stub.SubmitPrompts(pb.SubmitPromptsRequest(run_id=RUN, instances=instances))
        self._stub.Heartbeat(pb.HeartbeatRequest(run_id=RUN, member=self._member))
        leases = self._stub.LeasePrompts(
            pb.LeasePromptsRequest(run_id=RUN, holder="rollout", max_prompts=GROUPS, policy_version=self._step)
        ).leases
        return [self._answer(lease, payload) for lease, payload in zip(leases, self._payloads, strict=True)]

    def _answer(self, lease: pb.PromptLease, tensors: bytes) -> pb.PutGroup:
        header = experience_pb2.GroupHeader(
            instance_id=lease.instance.instance_id,
            purpose=lease.instance.purpose,
            min_policy_version=self._step,
            max_policy_version=self._step,
            completions=COMPLETIONS,
            completion_tokens=COMPLETIONS * 614,
            attempt=lease.attempt,
            reward_mean=0.5,
            reward_std=0.5,
        )
        return pb.PutGroup(
            lease_id=lease.lease_id, group=experience_pb2.ExperienceGroup(header=header, tensors=tensors)
        )


class Peer:
    """Producer and consumer at a stream of the same Redis."""

    def __init__(self, url: str, payloads: list[bytes]):
        self._redis, self._payloads = redis.Redis.from_url(url), payloads
        self._redis.xgroup_create("peer", "trainer", mkstream=True)

    def groups_per_second(self) -> float:
        started = time.perf_counter()
        for _ in range(STEPS_PER_ROUND):
            pipeline = self._redis.pipeline(transaction=False)
            for payload in self._payloads:
                pipeline.xadd("peer", {"group": payload})
            pipeline.execute()
            [(_, entries)] = self._redis.xreadgroup("trainer", "consumer", {"peer": ">"}, count=GROUPS)
            ids = [entry_id for entry_id, _ in entries]
            self._redis.pipeline(transaction=False).xack("peer", "trainer", *ids).xdel("peer", *ids).execute()
        return GROUPS * STEPS_PER_ROUND / (time.perf_counter() - started)


async def main() -> None:
    rng = np.random.default_rng(0)
    payloads = [make_tensors(rng) for _ in range(GROUPS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, url = redis_process(folder / "redis", folder / "redis.log", 0)
        server.start()
        try:
            await wait_until_ready(server, url, 20)
            with service("broker", folder, [f"broker.redis_url={url}"]) as address, connect_sync(address) as channel:
                ours = Ours(broker_pb2_grpc.BrokerServiceStub(channel), payloads)
                peer = Peer(url, payloads)
                figures = in_turn(ours.groups_per_second, peer.groups_per_second, ROUNDS)
        finally:
            await server.stop(5, asyncio.Event())
    size = sum(map(len, payloads)) / len(payloads) / 1000
    name = f"broker: groups of {size:.0f} KB, put to committed"
    report(Figure(name, "groups/s", *figures, "redis-py, the same Redis", "higher"))


if __name__ == "__main__":
    asyncio.run(main())
